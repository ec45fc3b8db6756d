"""Rows that are picked and put by their numbers, against one device."""

import pytest
import tensorflow as tf

from tests.partition.kit import check, kinds, once, rows, same

# Towers that a mask leaves nothing, and batches of a single example.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0), (1, 0))
_X = rows(-1, 4, 3)
_Y = rows(-1, 3)
_CLASS = rows(-1, dtype="int32", low=0, high=2)


def _size(t, dtype=tf.int32):
    return tf.shape(t, dtype)[0]


def _numbers(t):
    return tf.range(_size(t))


def _flat(t):
    return tf.reshape(t, [-1, 3])


def _chosen(y):
    return tf.cast(y[:, 0] > 0, tf.int32)


def _messages(x, y, c):
    """Along the edges of graphs that are put together."""
    edges = tf.where(tf.abs(x) > 0.3)
    source = edges[:, 0] * 4 + tf.argmax(y, 1)[0] * 0
    target = edges[:, 0] * 4
    sums = tf.math.unsorted_segment_sum(
        tf.gather(_flat(x), source), target, 4 * _size(x, tf.int64)
    )
    return tf.reshape(sums, [-1, 4, 3]) + y[:, None]


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
    same = tf.cast(again == number, tf.float32) * tf.cast(rest, tf.float32)
    return tf.gather(y, again) * same[:, None]


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
        tf.boolean_mask(y, y[:, 0] > -0.3), tf.boolean_mask(y, y[:, 0] > -0.3)[:, 1] > 0
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


@pytest.mark.parametrize("name", [*_EXAMPLES, *_MASKED])
def test_towers_pick_their_own_rows(name):
    function = {**_EXAMPLES, **_MASKED}[name]
    for seed in range(2):
        given = _X, _Y, _CLASS
        program = check(function, *given, towers=TOWERS, seed=seed)
        assert not once(program), once(program)
        for reduce in (tf.reduce_sum, tf.reduce_mean, _in_all):
            step = _training(function, reduce)
            program = check(step, *given, towers=TOWERS, seed=seed)
            assert not once(program), once(program)
