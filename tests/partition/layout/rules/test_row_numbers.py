"""Rows that are picked, put and summed by their numbers, or by the data.

What single operations do to them is tried by random programs.
"""

import dataclasses

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit
from tests.partition.kit import check_divided, check_on_towers, sharded
from tests.partition.layout_list import as_listed

pytestmark = pytest.mark.alternate

# Towers that a mask leaves nothing, and batches of a single example.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
_X = sharded(-1, 4, 3)
_Y = sharded(-1, 3)
_CLASS = sharded(-1, dtype="int32", low=0, high=2)
_LENGTHS = sharded(-1, dtype="int32", low=0, high=3)


def _size(t, dtype=tf.int32):
    return tf.shape(t, dtype)[0]


def _numbers(t):
    return tf.range(_size(t))


def _training(function, reduce):
    """A loss, and the gradients of what it follows from."""

    def step(x, y, c):
        found = tf.tanh(function(x, y, c))
        loss = reduce(found)
        grads = tf.gradients(loss, [x, y])
        return loss, *[g for g in grads if g is not None]

    return step


def _in_all(t):
    return tf.reduce_sum(t) / tf.cast(tf.shape(t)[0] + 1, tf.float32)


_HOSTILE = {
    "without segments": lambda x, y, c: tf.math.segment_sum(
        tf.zeros([0, 2]), tf.repeat(_numbers(y), 0)
    ),
    "mask of blocks": lambda x, y, c: tf.boolean_mask(
        tf.concat([y, -y], 0), tf.concat([y, -y], 0)[:, 0] > 0
    ),
    "mask along another axis": lambda x, y, c: tf.boolean_mask(
        tf.transpose(y), tf.transpose(y) > 0
    ),
    "sizes of several": lambda x, y, c: tf.fill(
        tf.stack([_size(tf.where(y > 0)), _size(tf.where(x > 0))]), 2.0
    ),
    "pairs are parted": lambda x, y, c: tf.dynamic_stitch(
        tf.dynamic_partition(tf.reshape(tf.range(2 * _size(y)), [-1, 2]), c, 3),
        tf.dynamic_partition(x[:, :2], c, 3),
    ),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_indices_that_may_reach_other_examples_are_exact(name):
    check_on_towers(_HOSTILE[name], _X, _Y, _CLASS, towers=TOWERS)


def _best(y):
    """The only row that has the largest first entry."""
    return tf.boolean_mask(y, y[:, 0] >= tf.reduce_max(y[:, 0]))


def _one_and_all(x, y, c):
    """A single row is repeated for all, as the mask leaves but one."""
    return _best(y) * y


def _one_and_some(x, y, c):
    some = tf.boolean_mask(y, c > 0)
    return _best(y) * some + tf.cast(_size(_best(y) * some), tf.float32)


@pytest.mark.parametrize("function", [_one_and_all, _one_and_some])
def test_a_single_row_that_is_repeated(function):
    for reduce in (tf.reduce_sum, tf.reduce_mean, _in_all):
        step = _training(function, reduce)
        check_on_towers(step, _X, _Y, _CLASS, towers=((3, 2), (4, 0, 3)))


def test_a_single_example_that_is_repeated():
    """It may be as often as only the data says."""

    def step(y, c):
        return tf.broadcast_to(y, [tf.reduce_max(c) + 2, 3])

    check_on_towers(step, _Y, _CLASS, towers=((0, 1, 0), (1,)))


# ---- steps -------------------------------------------------------------------


def _masked_loss(x, y, c):
    """A language model learns masked words."""
    mask = tf.abs(x[:, :, 0]) > 0.4
    labels = tf.boolean_mask(tf.cast(x[:, :, 1] > 0, tf.int32), mask)
    logits = tf.boolean_mask(x, mask)
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    right = tf.argmax(logits, 1, tf.int32) == labels
    return loss, tf.reduce_mean(tf.cast(right, tf.float32))


def _masks_of_masks(x, y, c):
    mask = c > 0
    some = tf.boolean_mask(y, mask)
    fewer = some[:, 0] > 0
    left = tf.boolean_mask(some, fewer)
    places = tf.boolean_mask(tf.where(mask)[:, 0], fewer)
    back = tf.math.unsorted_segment_sum(left, places, _size(y, tf.int64))
    among = tf.math.unsorted_segment_sum(
        left, tf.where(fewer)[:, 0], _size(some, tf.int64)
    )
    return back * y, among, places, tf.reduce_mean(among)


def _best_two(x, y, c):
    _, best = tf.math.top_k(y, 2)
    number = tf.range(_size(y))[:, None]
    return tf.gather(tf.reshape(y, [-1]), number * 3 + best) * [1.0, 2.0]


def _parts_of_pairs(x, y, c):
    parts = tf.stack([c, 1 - c % 2], 1)
    found = tf.dynamic_partition(x[:, :2], parts, 3)
    return *found, tf.reduce_mean(found[1] ** 2)


def _statistics(x, y, c):
    some = tf.boolean_mask(x, c > 0)
    return (
        tf.reduce_mean(some, [0, 1]),
        tf.reduce_max(some),
        tf.reduce_prod(some, 0),
        tf.math.count_nonzero(some),
        tf.reduce_any(some > 0),
        tf.linalg.norm(some),
        tf.nn.l2_normalize(some, 0),
        tf.reduce_logsumexp(some),
    )


_STEPS = {
    "masked": kit.with_gradients(_masked_loss),
    "masks of masks": kit.with_gradients(_masks_of_masks),
    "best two": kit.with_gradients(_best_two),
    "parts of pairs": kit.with_gradients(_parts_of_pairs),
    "statistics": _statistics,
}


@pytest.mark.parametrize("name", sample_of(_STEPS, 4))
def test_steps_by_the_data(name):
    check_divided(_STEPS[name], _X, _Y, _CLASS, towers=TOWERS)


@pytest.mark.parametrize("name", sample_of(_STEPS, 4))
def test_batches_of_a_known_size(name):
    given = [dataclasses.replace(one, examples=6) for one in (_X, _Y, _CLASS)]
    towers = (3, 3), (5, 1), (0, 6), (2, 0, 4)
    check_divided(_STEPS[name], *given, towers=towers)


def test_a_band_has_as_many_diagonals_as_there_are_examples():
    given = sharded(-1, 7, examples=6)
    check_on_towers(
        lambda x: tf.linalg.diag(x, k=(0, 5)), given, towers=((3, 3),)
    )


# ---- segments and ragged rows ------------------------------------------------


def _masked_mean(x, y, c):
    loss = tf.reduce_mean(tf.boolean_mask(y, c > 0) ** 2)
    (gradient,) = tf.gradients(loss, y)
    return loss, tf.reduce_sum(gradient, 0)


def _embedded(words, table):
    """The gradient is summed by words."""
    loss = tf.reduce_mean(tf.square(tf.gather(table, words)))
    (slices,) = tf.gradients(loss, [table])
    return loss, tf.convert_to_tensor(slices)


def _extremes(name):
    of_segments = getattr(tf.math, f"unsorted_segment_{name}")
    return lambda y, c: of_segments(y, c, 5)


_SEGMENT = sharded(-1, dtype="int32", low=-1, high=4)
_WORDS = sharded(-1, 5, dtype="int32", low=0, high=8)
SEGMENTS = {
    "a masked mean": (_masked_mean, _X, _Y, _CLASS),
    "an embedding": (_embedded, _WORDS, kit.replicated(9, 4)),
    **{
        f"{name} of segments{more}": (way(_extremes(name)), _Y, _SEGMENT)
        for name in ("max", "min", "prod")
        for more, way in (
            ("", lambda f: f),
            (", with gradients", kit.with_gradients),
        )
    },
}
test_segments = as_listed(
    "row numbers: segments", SEGMENTS, exchanges=True, towers=TOWERS
)


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

    check_on_towers(step, _LENGTHS, _Y, towers=TOWERS)
