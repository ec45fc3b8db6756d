"""Random numbers, and what an operation does besides computing."""

import pytest
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import refused, rows, same, traced
from tests.splitting.rules.case import cases

raw = tf.raw_ops


def _seed():
    return tf.constant([1, 2])


def _asserted(x):
    tf.debugging.Assert(tf.constant(True), [x])
    return tf.identity(x) * 1


def _after(x):
    with tf.control_dependencies([tf.no_op()]):
        return x * 1


def _optional(x):
    return raw.OptionalFromValue(components=[x])


CASES = [
    *cases("d:place -> - only d", "StatelessRandomGetKeyCounter", high=9),
    *cases(
        "ab -> ab",
        {
            "Assert": _asserted,
            "NoOp": _after,
            "OptionalGetValue": lambda x: raw.OptionalGetValue(
                optional=_optional(x),
                output_types=[tf.float32],
                output_shapes=[x.shape],
            ),
        },
    ),
    *cases("ab -> -", "OptionalHasValue", {"optional": _optional}),
]
COVERED = [
    *("StatelessRandomGetAlg", "StatelessRandomGetKeyCounterAlg"),
    *("RandomShuffle", "StatelessShuffle", "RandomIndexShuffle"),
    *("OptionalFromValue", "OptionalNone", "CTCLossV2"),
]


def _drawn(shape):
    trace = traced(
        lambda x: tf.random.stateless_uniform(shape(x), _seed()), rows(-1, 3)
    )
    (draw,) = trace.interpreter.draws.values()
    return trace.values[0], draw


_DRAWS = {
    "of the examples": (tf.shape, (0, 1, 1)),
    "along another axis": (lambda x: [5, tf.shape(x)[0]], (1, 1, 1)),
    "the same": (lambda x: [4], None),
}


@pytest.mark.parametrize(("shape", "place"), _DRAWS.values(), ids=_DRAWS)
def test_where_a_draw_has_examples(shape, place):
    value, draw = _drawn(shape)
    assert value.is_same if place is None else value.rows.place == place
    assert not draw.stateful


def test_a_draw_of_several_rows_has_an_order_at_its_first_use():
    value, _ = _drawn(lambda x: [2 * tf.shape(x)[0]])
    assert value.rows.count == 2 and value.rows.draw is not None


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (lambda x: [tf.shape(x)[0]] * 2, "all pairs"),
        (lambda x: [tf.shape(x)[0] - 1], "some of the examples"),
        (lambda x: [tf.cast(x[0, 0] * 0 + 3, tf.int32)], ""),
    ],
)
def test_draws_that_follow_data(shape, words):
    value, _ = _drawn(shape)
    assert value.reason is not None and words in value.reason.text


def test_a_draw_in_one_order_and_then_in_another():
    def draws(x):
        drawn = tf.random.stateless_uniform([2 * tf.shape(x)[0]], _seed())
        n = tf.shape(x)[0]
        one = tf.reshape(drawn, [n, 2]) * x
        return one, tf.transpose(tf.reshape(drawn, [2, n])) * x

    one, other = traced(draws, rows(-1, 2)).values[:2]
    assert one.kind is Kind.ROWS
    assert "two orders" in other.reason.text or "parts" in other.reason.text


def test_draws_by_a_seed_from_the_batch():
    def draws(x):
        seed = tf.cast(tf.stack([tf.reduce_sum(x), 1.0]), tf.int32)
        return tf.random.stateless_uniform([3], seed)

    reason = traced(draws, rows(-1, 2)).values[0].reason
    assert reason is not None


def test_shuffles():
    words = "shuffles"
    assert words in refused(tf.random.shuffle, rows(-1, 2))
    value = traced(tf.random.shuffle, same(4)).values[0]
    assert words in value.reason.text
    stateless = tf.random.experimental.stateless_shuffle
    value = traced(lambda x: stateless(x, _seed()), rows(-1, 2)).values[0]
    assert value.kind is Kind.OTHER


def test_no_value():
    def none():
        return raw.OptionalHasValue(optional=raw.OptionalNone())

    assert traced(none).values[0].is_same
