"""Functions, branches and loops."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import (
    check,
    loop,
    proven,
    refused,
    rows,
    same,
    total,
    traced,
)

_X = rows(-1, 3)


@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_a_branch_by_the_number_of_examples(size):
    def step(x):
        alone = tf.equal(tf.shape(x)[0], size)
        return tf.cond(
            alone, lambda: tf.reduce_mean(x), lambda: 2 * tf.reduce_mean(x)
        )

    assert refused(step, _X, towers=[(5, 2), (5, 3), (2, 1)])


def _mean(t):
    return tf.reduce_mean(t, 0)


def _weights_in_a_loop(x, w):
    (h,) = loop(3, lambda k, h: tf.tanh(h @ w), x)
    return tf.gradients(tf.reduce_mean(h), [w])


def _weights_in_a_branch(x, w):
    h = tf.cond(w[0, 0] > 0, lambda: tf.tanh(x @ w), lambda: x @ w)
    return tf.gradients(tf.reduce_mean(h), [w])


_ROWS, _SUM, _MEAN = (Kind.ROWS, 0), (Kind.SUM, 0), (Kind.SUM, -1)
_KNOWN = {
    "mean in a function": (lambda x, w: tf.function(_mean)(x), _MEAN),
    "branch by weights": (
        lambda x, w: tf.cond(w[0, 0] > 0, lambda: _mean(x), lambda: w[0] * 0),
        _MEAN,
    ),
    "branch that is known": (
        lambda x, w: tf.cond(
            tf.shape(x)[0] > 0, lambda: tf.reduce_sum(x), lambda: 0.0
        ),
        _SUM,
    ),
    "one of several branches": (
        lambda x, w: tf.switch_case(
            tf.cast(w[0, 0] > 0, tf.int32),
            [lambda: x, lambda: x * 2, lambda: -x],
        ),
        _ROWS,
    ),
    "loop": (lambda x, w: loop(3, lambda k, x: tf.nn.relu(x), x), _ROWS),
    "loop with a sum": (
        lambda x, w: loop(3, lambda k, s: s + tf.reduce_mean(x), 0.0),
        _MEAN,
    ),
    "gradients of a loop": (_weights_in_a_loop, _MEAN),
    "gradients of a branch": (_weights_in_a_branch, _MEAN),
    "map of features": (
        lambda x, w: tf.map_fn(lambda t: t * 2.0, tf.transpose(x)),
        _ROWS,
    ),
}


@pytest.mark.parametrize("name", _KNOWN)
def test_what_is_known(name):
    function, said = _KNOWN[name]
    value = proven(function, _X, same(3, 3))
    assert (value.kind, value.degree) == said


_REFUSED = {
    "mean in a function": (lambda x: x - tf.function(_mean)(x), "sum or mean"),
    "branches that scale differently": (
        lambda x: tf.cond(
            tf.random.stateless_uniform([], [1, 2]) > 0.5,
            lambda: tf.reduce_mean(x),
            lambda: tf.reduce_sum(x),
        ),
        "scale differently",
    ),
    "branch by the examples": (
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
        "",
    ),
    "sum that becomes a product": (
        lambda x: loop(3, lambda k, p: p * tf.reduce_mean(x), 1.0),
        "",
    ),
    "scan over the examples": (lambda x: tf.scan(lambda a, b: a + b, x), ""),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_refused(name):
    function, words = _REFUSED[name]
    assert words in refused(function, _X)


def test_a_loop_whose_first_round_is_linear():
    def step(x, s):
        return loop(3, lambda k, a, b: (b, a * a), s, tf.reduce_mean(x))

    values = check(step, _X, same())
    assert all(value.kind is Kind.OTHER for value in values)


def _rounds(stop):
    def body(k, s):
        return k + 1, s + 1.0

    end = tf.cast(stop, tf.float32)
    return tf.while_loop(lambda k, _: k < end, body, (0.0, 0.0))[1]


def test_a_loop_of_as_many_rounds_as_follow_from_the_batch():
    assert refused(lambda x: _rounds(x[0, 0]), _X)
    assert refused(lambda x: _rounds(2 * tf.shape(x)[0]), _X)
    assert proven(lambda x: _rounds(tf.shape(x)[0]), _X).degree == 1


def test_what_a_loop_by_the_batch_leaves_as_it_is():
    def step(x, w):
        def body(k, w, doubled):
            return k + 1, w, doubled * 2.0

        return tf.while_loop(lambda k, *_: k < tf.shape(x)[0], body, (1, w, w))

    counter, kept, doubled = check(step, _X, same(3))
    assert counter.kind is doubled.kind is Kind.OTHER
    assert kept.is_same


def _recurrent(x, w):
    inputs = tf.TensorArray(tf.float32, 4).unstack(tf.transpose(x, [1, 0, 2]))

    def body(k, h, outputs):
        h = tf.tanh(h @ w + inputs.read(k))
        return h, outputs.write(k, h)

    first = tf.zeros([tf.shape(x)[0], 3])
    _, outputs = loop(4, body, first, tf.TensorArray(tf.float32, 4))
    return tf.transpose(outputs.stack(), [1, 0, 2])


def test_a_recurrent_layer_with_its_gradient():
    sequences, kernel = rows(-1, 4, 3), same(3, 3)
    value = proven(_recurrent, sequences, kernel)
    assert value.kind is Kind.ROWS and value.rows.place == (0, 1, 1)

    def step(x, w):
        return tf.gradients(tf.reduce_mean(_recurrent(x, w)), [w])

    assert proven(step, sequences, kernel).degree == -1


def test_sums_of_several_degrees_in_a_loop():
    generator = np.random.default_rng(0)
    for degree in (-1, 0, 1):
        x = total(3, degree=degree)
        towers = [tuple(generator.integers(1, 6, 3))]
        value = proven(
            lambda x: loop(2, lambda k, s: s + x, tf.zeros([3])),
            x,
            towers=towers,
        )
        assert value.degree == degree


def _ctc(logits, labels, time_major=False):
    """How likely labels are, by functions that keep a definition only."""
    count = tf.shape(labels)[0]
    size = tf.reduce_sum(tf.cast(labels > 0, tf.int32), 1)
    losses = tf.nn.ctc_loss(
        labels, logits, size, tf.fill([count], 5), time_major, blank_index=0
    )
    return losses, *tf.gradients(tf.reduce_mean(losses), [logits])


_LABELS = rows(-1, 3, dtype="int32", low=0, high=3)


def test_sequences_that_are_aligned_with_labels():
    losses, gradient = check(_ctc, rows(-1, 5, 4), _LABELS, towers=((3, 2),))
    assert losses.rows.place == gradient.rows.place == (0, 1, 1)
    assert (losses.degree, gradient.degree) == (0, -1)


def test_examples_in_place_of_steps_of_a_sequence():
    def step(logits, labels):
        return _ctc(logits[:, :5, :], labels[:5], time_major=True)[0]

    value = traced(step, rows(-1, 5, 4), _LABELS).values[0]
    assert value.kind is Kind.OTHER
