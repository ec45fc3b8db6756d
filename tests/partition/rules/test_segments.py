"""Rows that are summed, counted and compared by segments."""

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit

pytestmark = pytest.mark.alternate

TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
_Y = kit.sharded(-1, 3)
_CLASS = kit.sharded(-1, dtype="int32", low=-1, high=4)
_PAIRS = kit.sharded(-1, 2, dtype="int32", low=0, high=3)


def _centroids(y, c, p):
    sums = tf.math.unsorted_segment_sum(y, p[:, 0], 4)
    ones = tf.math.unsorted_segment_sum(tf.ones_like(y), p[:, 0], 4)
    return sums / tf.maximum(ones, 1.0)


_SUMS = {
    "classes": lambda y, c, p: tf.math.unsorted_segment_sum(y, c, 5),
    "means": lambda y, c, p: tf.math.unsorted_segment_mean(y, c, 5),
    "pairs": lambda y, c, p: tf.math.unsorted_segment_sum(
        tf.stack([y, y * y], 1), p, 4
    ),
    "added to": lambda y, c, p: tf.tensor_scatter_nd_add(
        tf.ones([4, 4, 3]), p, y
    ),
    "taken from": lambda y, c, p: tf.tensor_scatter_nd_sub(
        tf.ones([4, 3]), p[:, :1], y
    ),
    "centroids": _centroids,
}
# Of tf.debugging.
_CHECKS = {"If", "Assert"}
_EXTREMES = {
    name: lambda y, c, p, f=f: f(y, c, 5)
    for name, f in {
        "max": tf.math.unsorted_segment_max,
        "min": tf.math.unsorted_segment_min,
        "prod": tf.math.unsorted_segment_prod,
    }.items()
}


@pytest.mark.parametrize("name", sample_of(_SUMS, 3))
def test_sums_of_segments_are_divided(name):
    given = _Y, _CLASS, _PAIRS
    step = kit.with_gradients(_SUMS[name])
    program = kit.check_on_towers(step, *given, towers=TOWERS)
    assert set(kit.computed_once(program)) <= _CHECKS, kit.computed_once(
        program
    )


@pytest.mark.parametrize("name", _EXTREMES)
def test_extremes_of_segments_are_those_of_all_towers(name):
    given = _Y, _CLASS, _PAIRS
    program = kit.check_divided(_EXTREMES[name], *given, towers=TOWERS)
    assert kit.exchange_counts(program) == {"gather": 1}
    step = kit.with_gradients(_EXTREMES[name])
    kit.check_on_towers(step, *given, towers=TOWERS)


def test_segments_of_partial_sums():
    def step(t, v):
        return (
            tf.math.unsorted_segment_sum(v, [1, 0, 1, -1], 3),
            tf.scatter_nd([[1], [0], [1], [3]], v, [4, 3]),
        )

    program = kit.check_on_towers(
        step, kit.sharded(-1), kit.partial_sum(4, 3), towers=TOWERS
    )
    assert kit.exchange_counts(program)["sum"] == 2


def test_gradients_of_embeddings_are_summed_by_words():
    def step(words, table):
        loss = tf.reduce_mean(tf.square(tf.gather(table, words)))
        (slices,) = tf.gradients(loss, [table])
        return loss, tf.convert_to_tensor(slices)

    given = (
        kit.sharded(-1, 5, dtype="int32", low=0, high=8),
        kit.replicated(9, 4),
    )
    program = kit.check_divided(step, *given, towers=TOWERS)
    assert kit.exchange_counts(program) == {"sum": 2}
