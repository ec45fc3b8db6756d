"""Ragged rows of examples, against one device."""

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit

pytestmark = pytest.mark.alternate

# Towers without entries, and without examples.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
_Y = kit.sharded(-1, 3)
_LENGTHS = kit.sharded(-1, dtype="int32", low=0, high=3)


def _normalized(r, y):
    """Each entry by the mean of its row."""
    mean = tf.reduce_sum(r, 1) / (1.0 + tf.reduce_sum(r * r, 1))
    return r.with_values(r.values * tf.gather(mean, r.value_rowids()))


_STEPS = {
    "mean": lambda r, y: tf.math.divide_no_nan(
        tf.reduce_sum(r, 1), tf.reduce_sum(tf.ones_like(r), 1)
    ),
    "largest": lambda r, y: tf.maximum(tf.reduce_max(r, 1), -9.0),
    "lengths": lambda r, y: (
        tf.reduce_sum(r, 1) * tf.cast(r.row_lengths(), tf.float32)[:, None]
    ),
    "with rows": lambda r, y: tf.reduce_sum(r, 1) * y,
    "spread": lambda r, y: tf.reduce_sum(_normalized(r, y), 1),
    "of examples": lambda r, y: tf.gather(y, r.value_rowids()) * r.values,
}
_FORWARD = {
    "dense": lambda r, y: r.to_tensor(shape=(None, 5, None)) + y[:, None],
    "cut": lambda r, y: r.to_tensor(default_value=2.0, shape=(None, 2, 3)),
}


def _on_ragged(function):
    def step(values, splits, y):
        r = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        return function(r, y)

    return step


@pytest.mark.parametrize("name", sample_of(_STEPS, 3))
def test_ragged_rows(name):
    step = kit.with_gradients(_on_ragged(_STEPS[name]))
    kit.check_divided(step, *kit.ragged(3), _Y, towers=TOWERS)


@pytest.mark.parametrize("name", _FORWARD)
def test_ragged_rows_that_are_filled_up(name):
    step = _on_ragged(_FORWARD[name])
    kit.check_divided(step, *kit.ragged(3), _Y, towers=TOWERS)


_REPEATS = {
    "numbers": lambda n, y: tf.repeat(tf.range(tf.shape(n)[0]), n),
    "summed again": lambda n, y: tf.math.unsorted_segment_sum(
        tf.repeat(y[:, 0], n),
        tf.repeat(tf.range(tf.shape(n)[0]), n),
        tf.shape(n)[0],
    ),
}


@pytest.mark.parametrize("name", _REPEATS)
def test_entries_that_are_repeated(name):
    kit.check_divided(_REPEATS[name], _LENGTHS, _Y, towers=TOWERS)


def test_a_mask_that_only_looks_like_a_repeat():
    """A mask that leaves other entries than the lengths say."""

    def step(n, y):
        most = tf.maximum(0, tf.reduce_max(n))
        mask = tf.range(most) < n[:, None] - 1
        tiled = tf.tile(y[:, :1], tf.stack([1, most]))
        found = tf.boolean_mask(tiled, mask)
        others = tf.boolean_mask(
            tf.tile(tf.expand_dims(y[:, 0], 1), tf.stack([1, most])),
            tf.range(most) < tf.expand_dims(n[::-1], -1),
        )
        return found, others

    kit.check_on_towers(step, _LENGTHS, _Y, towers=TOWERS)
