"""Rows that are picked and put by their numbers, against one device."""

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition.kit import check_divided, check_on_towers, sharded

pytestmark = pytest.mark.alternate

# Towers that a mask leaves nothing, and batches of a single example.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0), (1, 0))
DRAWN = 10
_X = sharded(-1, 4, 3)
_Y = sharded(-1, 3)
_CLASS = sharded(-1, dtype="int32", low=0, high=2)


def _size(t, dtype=tf.int32):
    return tf.shape(t, dtype)[0]


def _numbers(t):
    return tf.range(_size(t))


def _flat(t):
    return tf.reshape(t, [-1, 3])


def _chosen(y):
    return tf.cast(y[:, 0] > 0, tf.int32)


def _dispatched(x, y, c):
    choice = _chosen(y)
    one, two = tf.dynamic_partition(y, choice, 2)
    places = tf.dynamic_partition(_numbers(y), choice, 2)
    return tf.dynamic_stitch(places, [one**2, tf.tanh(two)])


def _nearest(x, y, c):
    best = tf.argmax(x[:, :, 0], 1)
    number = tf.range(_size(x, tf.int64))
    return tf.gather(_flat(x), number * 4 + best) + y


def _of_numbers(x, y, c):
    number = tf.repeat(_numbers(x), 4)
    again, rest = number * 8 // 8, (number * 4 + 2) % 4
    alike = tf.cast(again == number, tf.float32) * tf.cast(rest, tf.float32)
    return tf.gather(y, again) * alike[:, None]


def _twice(x, y, c):
    mask = y[:, 0] > 0
    return tf.boolean_mask(x, mask) * tf.boolean_mask(y, mask)[:, None]


def _scattered(x, y, c):
    mask = tf.where(tf.abs(y) > 0.3)
    return tf.scatter_nd(mask, tf.gather_nd(y, mask), tf.shape(y, tf.int64))


def _updated(x, y, c):
    places = tf.where(y[:, 0] > 0)
    some = tf.gather_nd(y, places) * 2.0
    return tf.tensor_scatter_nd_update(y, places, some)


_EXAMPLES = {
    "pick by number": lambda x, y, c: tf.gather_nd(
        y, tf.stack([_numbers(y), c], 1)
    ),
    "pick by batch": lambda x, y, c: tf.gather(y, c, batch_dims=1),
    "picks by batch": lambda x, y, c: tf.gather(
        x, tf.stack([c, c * 0], 1), batch_dims=1
    ),
    "best by number": lambda x, y, c: tf.gather_nd(
        x, tf.stack([_numbers(x), tf.argmax(y, 1, tf.int32)], 1)
    ),
    "columns of numbers": lambda x, y, c: tf.gather_nd(
        y, tf.concat([_numbers(y)[:, None], c[:, None]], 1)
    ),
    "dispatched": _dispatched,
    "nearest": _nearest,
    "numbers": _of_numbers,
    "scattered": _scattered,
    "updated": _updated,
    "segments in order": lambda x, y, c: [
        f(_flat(x), tf.repeat(_numbers(x), 4)) * y
        for f in (tf.math.segment_mean, tf.math.segment_max)
    ],
    "segments of pairs": lambda x, y, c: tf.math.segment_sum(
        x, _numbers(x) // 1
    ),
    "every second": lambda x, y, c: tf.gather(
        _flat(x), tf.range(0, 4 * _size(x), 2)
    ),
    "picked numbers": lambda x, y, c: tf.gather(
        y, tf.boolean_mask(_numbers(y), y[:, 0] > 0)
    ),
}
_MASKED = {
    "examples": lambda x, y, c: tf.boolean_mask(x, y[:, 0] > 0),
    "entries": lambda x, y, c: tf.boolean_mask(x, x[:, :, 0] > 0),
    "single entries": lambda x, y, c: tf.boolean_mask(x, x > 0)[:, None],
    "twice": _twice,
    "masked masked": lambda x, y, c: tf.boolean_mask(
        tf.boolean_mask(y, y[:, 0] > -0.3),
        tf.boolean_mask(y, y[:, 0] > -0.3)[:, 1] > 0,
    ),
    "blocks": lambda x, y, c: tf.gather_nd(
        _flat(x), tf.where(_flat(x)[:, 0] > 0)
    ),
    "part": lambda x, y, c: tf.dynamic_partition(x, _chosen(y), 2)[1],
}


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


@pytest.mark.parametrize("name", sample_of([*_EXAMPLES, *_MASKED], DRAWN))
def test_towers_pick_their_own_rows(name):
    function = {**_EXAMPLES, **_MASKED}[name]
    steps = [
        _training(function, reduce)
        for reduce in (tf.reduce_sum, tf.reduce_mean, _in_all)
    ]
    for step in (function, *steps):
        check_divided(step, _X, _Y, _CLASS, towers=TOWERS)


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
    check_on_towers(_HOSTILE[name], _X, _Y, _CLASS, towers=TOWERS[:4])


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
