"""Loops that go round once for each example."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import check, proven, rows, same

_X = rows(-1, 3)
_W = same(3, 3)
# A list of its own, of which every round has one element.
_List: Any = tf.TensorArray


def _mapped(one: Any) -> Any:
    return lambda x, *rest: tf.map_fn(lambda t: one(t, *rest), x)


def _gradient(function: Any) -> Any:
    """The gradients of a mean, of its arguments."""

    def step(*given: Any) -> Any:
        return tf.gradients(tf.reduce_mean(function(*given) ** 2), given)

    return step


def _branch(t: Any) -> Any:
    return tf.cond(t[0] > 0, lambda: t * 2.0, lambda: -t)


def _inner_loop(t: Any) -> Any:
    kept = _List(tf.float32, 3)
    _, kept = tf.while_loop(
        lambda k, _: k < 3,
        lambda k, kept: (k + 1, kept.write(k, tf.reduce_sum(t) ** 2)),
        (0, kept),
    )
    return kept.stack()


_EACH = {
    "softmax": lambda t: tf.nn.softmax(t) * 2.0,
    "sum": lambda t: tf.reduce_sum(t, keepdims=True) * tf.ones([3]),
    "branch": _branch,
    "inner loop": _inner_loop,
    "picked": lambda t: tf.gather(tf.eye(3), tf.argmax(t)),
    "norm": lambda t: tf.nn.l2_loss(t) * tf.ones([3]),
    "scattered": lambda t: tf.scatter_nd([[0], [2]], t[1:], [3]),
    "counted": lambda t: tf.math.unsorted_segment_sum(
        t, tf.cast(t > 0, tf.int32), 3
    ),
}


@pytest.mark.parametrize("one", _EACH.values(), ids=_EACH)
def test_what_is_mapped_over_the_examples(one):
    assert proven(_mapped(one), _X).rows.place == (0, 1, 1)


@pytest.mark.parametrize("name", ["softmax", "sum"])
def test_gradients_of_what_is_mapped(name):
    value = proven(_gradient(_mapped(_EACH[name])), _X)
    assert value.kind is Kind.ROWS and value.degree == -1


def test_gradients_of_weights_in_a_map():
    step = _gradient(_mapped(lambda t, w: tf.linalg.matvec(w, tf.tanh(t))))
    of_rows, of_weights = check(step, _X, _W)
    assert of_rows.kind is Kind.ROWS
    assert of_weights.kind is Kind.SUM and of_weights.degree == -1


def test_several_lists_at_once():
    def step(x: Any, y: Any) -> Any:
        a, b = tf.map_fn(lambda t: (t[0] * t[1], t[1] + 1.0), (x, y))
        return a - b

    assert proven(step, _X, _X).rows.place == (0, 1, 1)


def test_sums_over_the_examples_by_a_loop():
    def step(x: Any) -> Any:
        return tf.foldl(lambda s, t: s + t * t, x, tf.zeros([3]))

    assert proven(step, _X).kind is Kind.SUM


def _numbered(one: Any) -> Any:
    """A loop whose rounds have a number, a list of examples and a new one."""

    def step(x: Any) -> Any:
        n = tf.shape(x)[0]
        taken = _List(tf.float32, n, clear_after_read=False).unstack(x)

        def body(k: Any, made: Any) -> Any:
            return k + 1, one(k, taken, made, n)

        made = _List(tf.float32, n, element_shape=[3])
        _, made = tf.while_loop(
            lambda k, _: k < n, body, (0, made), maximum_iterations=n
        )
        return made.stack()

    return step


def test_a_loop_of_rounds_by_hand():
    step = _numbered(lambda k, taken, made, n: made.write(k, taken.read(k)))
    assert proven(step, _X).rows.place == (0, 1, 1)


def _table(k: Any, taken: Any, made: Any, n: Any) -> Any:
    table = _List(tf.float32, 9).unstack(tf.reshape(tf.range(27.0), [9, 3]))
    return made.write(k, table.read(k))


_HOSTILE = {
    "number": lambda k, taken, made, n: made.write(
        k, taken.read(k) * tf.cast(k, tf.float32)
    ),
    "first": lambda k, taken, made, n: made.write(k, taken.read(0)),
    "before": lambda k, taken, made, n: made.write(
        k, taken.read(tf.maximum(k - 1, 0))
    ),
    "backwards": lambda k, taken, made, n: made.write(n - 1 - k, taken.read(k)),
    "always the first": lambda k, taken, made, n: made.write(0, taken.read(k)),
    "of its own": lambda k, taken, made, n: made.write(
        k, made.read(tf.maximum(k - 1, 0)) + taken.read(k)
    ),
    "table": _table,
    "random": lambda k, taken, made, n: made.write(
        k, taken.read(k) * tf.random.uniform([])
    ),
}


@pytest.mark.parametrize("one", _HOSTILE.values(), ids=_HOSTILE)
def test_what_numbers_the_examples(one):
    (value,) = check(_numbered(one), _X)
    assert value.kind is Kind.OTHER or value.degree is None


def _scan(x: Any) -> Any:
    return tf.scan(lambda a, b: 0.5 * a + b, x, tf.zeros([3]))


def _running_sum(x: Any) -> Any:
    n = tf.shape(x)[0]
    taken = _List(tf.float32, n).unstack(x)

    def body(k: Any, s: Any, made: Any) -> Any:
        s = s + taken.read(k)
        return k + 1, s, made.write(k, s)

    made = _List(tf.float32, n, element_shape=[3])
    return tf.while_loop(lambda k, *_: k < n, body, (0, tf.zeros([3]), made))[
        2
    ].stack()


def _pushed(x: Any, times: int = 1) -> Any:
    n = tf.shape(x)[0]
    taken = _List(tf.float32, n).unstack(x)
    raw: Any = tf.raw_ops

    def body(k: Any, made: Any) -> Any:
        t = taken.read(k)
        for _ in range(times):
            made = raw.TensorListPushBack(input_handle=made, tensor=t)
        return k + 1, made

    made = raw.EmptyTensorList(
        element_shape=[3], max_num_elements=99, element_dtype=tf.float32
    )
    made = tf.while_loop(lambda k, _: k < n, body, (0, made))[1]
    return raw.TensorListStack(
        input_handle=made, element_shape=[3], element_dtype=tf.float32
    )


def _last(x: Any) -> Any:
    taken = _List(tf.float32, tf.shape(x)[0]).unstack(x).flow
    _, t = tf.raw_ops.TensorListPopBack(
        input_handle=taken, element_shape=[3], element_dtype=tf.float32
    )
    return tf.nn.l2_loss(t)


def _popped_and_read(x: Any) -> Any:
    """Every example meets the one that stands as far from the end."""
    n = tf.shape(x)[0]
    first = _List(tf.float32, n).unstack(x)
    second = _List(tf.float32, n).unstack(x).flow

    def body(k: Any, left: Any, made: Any) -> Any:
        left, t = tf.raw_ops.TensorListPopBack(
            input_handle=left, element_shape=[3], element_dtype=tf.float32
        )
        return k + 1, left, made.write(k, t * first.read(k))

    made = _List(tf.float32, n, element_shape=[3])
    return tf.while_loop(lambda k, *_: k < n, body, (0, second, made))[
        2
    ].stack()


def _second_order(x: Any) -> Any:
    y = tf.map_fn(lambda t: tf.tanh(t) * tf.reduce_sum(t), x)
    (first,) = tf.gradients(tf.reduce_sum(y), [x])
    return tf.gradients(tf.reduce_mean(first**2), [x])


def _one_round_fewer(x: Any) -> Any:
    end = tf.shape(x)[0] - 1
    taken = _List(tf.float32, end + 1).unstack(x)
    return tf.while_loop(
        lambda k, _: k < end,
        lambda k, s: (k + 1, s + taken.read(k)),
        (0, tf.zeros([3])),
    )[1]


_CARRYING = {
    "one round fewer": _one_round_fewer,
    "scan": _scan,
    "decaying sum": lambda x: tf.foldl(
        lambda a, b: 0.5 * a + b, x, tf.zeros([3])
    ),
    "product": lambda x: tf.foldl(lambda a, b: a * b, x, tf.ones([3])),
    "last one": lambda x: tf.foldl(lambda a, b: b, x, tf.zeros([3])),
    "largest": lambda x: tf.foldl(tf.maximum, x, tf.zeros([3])),
    "running sum": _running_sum,
    "pushed twice": lambda x: _pushed(x, 2),
    "last element": _last,
    "both ends": _popped_and_read,
}


@pytest.mark.parametrize("step", _CARRYING.values(), ids=_CARRYING)
def test_what_goes_from_example_to_example(step):
    (value,) = check(step, _X)
    assert value.kind is Kind.OTHER, value


def test_what_is_said_of_others_is_true():
    check(_second_order, _X)
    check(_pushed, _X)
    check(_gradient(_mapped(_branch)), _X)
    check(_gradient(_mapped(_inner_loop)), _X)
    check(_mapped(_EACH["softmax"]), _X, towers=[(1, 1)])


def test_examples_that_meet_all_examples():
    def step(x: Any) -> Any:
        return tf.map_fn(lambda t: t - tf.reduce_mean(x, 0), x)

    (value,) = check(step, _X)
    assert "sum or mean" in value.reason.text


def test_gradients_of_a_bias_in_a_map():
    step = _gradient(_mapped(lambda t, b: tf.nn.bias_add(t[None], b)[0] ** 2))
    _, of_bias = check(step, _X, same(3))
    assert of_bias.kind is Kind.SUM
