"""Rows of which each example has as many as only the step knows."""

import dataclasses

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit
from tests.partition.kit import check_divided, check_on_towers, sharded

pytestmark = pytest.mark.alternate

# Towers without examples, and batches of a single one.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
# Padded texts of 3 words, and their targets: the trace does not know that they
# are equally long.
_X = sharded(-1, 3, 4, hidden=(1,))
_Y = sharded(-1, 3, 4, hidden=(1,))
_WORDS = sharded(-1, 3, hidden=(1,), dtype="int32", low=0, high=3)


def _scores(x):
    """A dense layer, which joins all words."""
    matrix = tf.reshape(tf.range(16.0), [4, 4]) / 16 - 0.3
    return tf.tanh(tf.tensordot(x, matrix, 1))


def _in_heads(x, y, c):
    size = tf.shape(x)
    heads = tf.reshape(_scores(x), [size[0] * size[1], 2, 2])
    back = tf.reshape(tf.nn.softmax(heads), tf.shape(x))
    return tf.reduce_mean(back**2), tf.reduce_max(heads, [1, 2])


def _squared(x, y, c):
    return tf.reduce_mean((_scores(x) - y) ** 2)


def _weighted(x, y, c):
    """Masks are broadcast along the last axis."""
    mask = tf.cast(c > 0, tf.float32)
    lost = tf.abs(_scores(x) - y) * mask[:, :, None]
    return tf.reduce_sum(lost) / (1 + tf.reduce_sum(mask))


def _classes(x, y, c):
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(c, _scores(x))
    )


def _distributions(x, y, c):
    return tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), _scores(x))
    )


def _pairs(x, y, c):
    z = _scores(x)[:, 0]
    flat = tf.reshape(tf.matmul(z, z, transpose_b=True), [-1])
    rows = tf.shape(z)[0]
    return tf.reduce_mean(tf.reshape(flat, [rows, rows]) * z[:, :1])


def _some_texts(x, y, c):
    some = tf.boolean_mask(x, x[:, 0, 0] > 0)
    return tf.reduce_sum(_scores(some) ** 2)


STEPS = {
    step.__name__: kit.with_gradients(step)
    for step in (
        _in_heads,
        _squared,
        _weighted,
        _classes,
        _distributions,
        _pairs,
        _some_texts,
    )
}


@pytest.mark.parametrize("name", sample_of(STEPS, 4))
def test_texts_of_a_varying_length_are_divided(name):
    check_divided(STEPS[name], _X, _Y, _WORDS, towers=TOWERS)


@pytest.mark.parametrize("name", sample_of(STEPS, 3))
def test_batches_of_a_known_size_with_texts_of_a_varying_length(name):
    given = [dataclasses.replace(one, examples=6) for one in (_X, _Y, _WORDS)]
    check_on_towers(STEPS[name], *given, towers=((3, 3), (0, 6), (2, 0, 4)))


@pytest.mark.parametrize("length", [1, 3])
def test_the_gradient_of_what_may_be_broadcast(length):
    """Either of both may have a single word, and the batch a single text."""
    targets = sharded(-1, length, 4, hidden=(1,))
    words = sharded(-1, 4 - length, 4, hidden=(1,))
    for given in ((words, targets), (targets, words)):
        step = kit.with_gradients(lambda x, y: tf.reduce_mean((x - y) ** 2))
        check_on_towers(step, *given, towers=(*TOWERS, (1, 0)))
