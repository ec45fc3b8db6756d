"""Rows that are summed, counted and compared by segments."""

import pytest
import tensorflow as tf

from tests.kit.long import some_of
from tests.partition.kit import (
    check,
    check_divided,
    kinds,
    once,
    part,
    rows,
    same,
)

TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
_Y = rows(-1, 3)
_CLASS = rows(-1, dtype="int32", low=-1, high=4)
_PAIRS = rows(-1, 2, dtype="int32", low=0, high=3)


def _count(t):
    return tf.shape(t)[0]


def _confusion(y, c, p):
    found = tf.argmax(y, 1)
    return tf.math.confusion_matrix(p[:, 0], found, 4, dtype=tf.float32)


def _centroids(y, c, p):
    sums = tf.math.unsorted_segment_sum(y, p[:, 0], 4)
    ones = tf.math.unsorted_segment_sum(tf.ones_like(y), p[:, 0], 4)
    return sums / tf.maximum(ones, 1.0)


def _weighed(y, c, p):
    some = tf.math.bincount(p[:, 0], minlength=4, maxlength=4)
    return tf.gather(1 / (tf.cast(some, tf.float32) + 1), p[:, 0])


_SUMS = {
    "classes": lambda y, c, p: tf.math.unsorted_segment_sum(y, c, 5),
    "means": lambda y, c, p: tf.math.unsorted_segment_mean(y, c, 5),
    "square roots": lambda y, c, p: tf.math.unsorted_segment_sqrt_n(y, c, 5),
    "pairs": lambda y, c, p: tf.math.unsorted_segment_sum(
        tf.stack([y, y * y], 1), p, 4
    ),
    "one value": lambda y, c, p: tf.math.unsorted_segment_sum(
        tf.fill([_count(y)], 2.0) * y[:, 0], c, 5
    ),
    "table": lambda y, c, p: tf.scatter_nd(p, y, [4, 4, 3]),
    "added to": lambda y, c, p: tf.tensor_scatter_nd_add(
        tf.ones([4, 4, 3]), p, y
    ),
    "taken from": lambda y, c, p: tf.tensor_scatter_nd_sub(
        tf.ones([4, 3]), p[:, :1], y
    ),
    "confusion": _confusion,
    "centroids": _centroids,
    "weighed": _weighed,
    "counts": lambda y, c, p: tf.math.bincount(
        p[:, 0], minlength=4, maxlength=4
    ),
    "weighed counts": lambda y, c, p: tf.raw_ops.DenseBincount(
        input=p[:, 0], size=4, weights=y[:, 0]
    ),
    "counts of each": lambda y, c, p: tf.raw_ops.DenseBincount(
        input=p, size=4, weights=tf.constant([], tf.float32)
    ),
    "weighed counts of each": lambda y, c, p: tf.raw_ops.DenseBincount(
        input=p, size=4, weights=y[:, :2]
    ),
    "old counts": lambda y, c, p: tf.raw_ops.Bincount(
        arr=p, size=3, weights=tf.cast(p, tf.float32)
    ),
}
_WITHOUT_GRADIENT = {"weighed counts", "weighed counts of each"}
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


@pytest.mark.parametrize("name", some_of([*_SUMS, *_EXTREMES], 3))
def test_segments_of_all(name):
    function = {**_SUMS, **_EXTREMES}[name]
    for seed in range(2):
        program = check(function, _Y, _CLASS, _PAIRS, towers=TOWERS, seed=seed)
        assert set(once(program)) <= _CHECKS, once(program)
    if name in _EXTREMES:
        assert kinds(program) == {"gather": 1}


@pytest.mark.parametrize(
    "name", some_of(sorted(set(_SUMS) - _WITHOUT_GRADIENT), 3)
)
def test_gradients_of_sums(name):
    def step(y, c, p):
        loss = tf.reduce_sum(
            tf.square(tf.cast(_SUMS[name](y, c, p), tf.float32))
        )
        return loss, *[g for g in tf.gradients(loss, [y]) if g is not None]

    for seed in range(2):
        program = check(step, _Y, _CLASS, _PAIRS, towers=TOWERS, seed=seed)
        assert set(once(program)) <= _CHECKS, once(program)


@pytest.mark.parametrize("name", _EXTREMES)
def test_gradients_of_extremes(name):
    def step(y, c, p):
        loss = tf.reduce_sum(tf.tanh(_EXTREMES[name](y, c, p)))
        return loss, *tf.gradients(loss, [y])

    for seed in range(2):
        check(step, _Y, _CLASS, _PAIRS, towers=TOWERS, seed=seed)


def test_parts_of_sums():
    def step(t, v):
        return (
            tf.math.unsorted_segment_sum(v, [1, 0, 1, -1], 3),
            tf.scatter_nd([[1], [0], [1], [3]], v, [4, 3]),
        )

    program = check(step, rows(-1), part(4, 3), towers=TOWERS)
    assert kinds(program)["sum"] == 2


def test_embeddings_that_have_gradients():
    """IndexedSlices are summed by the words they belong to."""

    def step(words, table):
        found = tf.gather(table, words)
        loss = tf.reduce_mean(tf.square(found))
        (slices,) = tf.gradients(loss, [table])
        return loss, tf.convert_to_tensor(slices)

    given = rows(-1, 5, dtype="int32", low=0, high=8), same(9, 4)
    program = check_divided(step, *given, towers=TOWERS)
    assert kinds(program) == {"sum": 2}


def test_words_are_numbered_once():
    def step(words, y):
        found, at, count = tf.unique_with_counts(words)
        return found, at, count, tf.gather(count, at)

    program = check(step, _CLASS, _Y, towers=TOWERS)
    assert set(once(program)) == {"UniqueWithCounts"}
