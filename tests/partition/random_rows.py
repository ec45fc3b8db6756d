"""Operations of random programs on rows: single ones, and by their numbers."""

import tensorflow as tf

from tests.partition.random_kinds import SEGMENTS, add_to, bounded, size_of

OF_ANY, OF_ROWS = [], []


def _pairs(x, y):
    """What pairs of an example and a later one make."""
    i, j = tf.meshgrid(tf.range(size_of(x)), tf.range(size_of(x)))
    later = tf.boolean_mask(tf.stack([i, j], -1), i < j)
    return tf.gather(x, later[:, 0]) - tf.gather(y, later[:, 1])


def _repeated(values, lengths):
    lengths = tf.cast(lengths, tf.int64)
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


@add_to(OF_ANY)
def _number(o):
    x = o.x
    return o.one_of(
        lambda: tf.tanh(x),
        lambda: tf.zeros_like(x),
        lambda: tf.exp(-tf.abs(x)),
        lambda: x * tf.cast(size_of(x), tf.float32) * 0.1,
        lambda: x + tf.random.stateless_uniform(tf.shape(x), (3, 4)) * 0.1,
    )


@add_to(OF_ANY)
def _pair(o):
    x, y = o.x, o.y
    return o.one_of(lambda: (x + y) * 0.5, lambda: x * y)


@add_to(OF_ROWS)
def _of_rows(o):
    x = o.x
    return o.one_of(
        lambda: tf.reduce_sum(x, 0) * 0.1,
        lambda: x * tf.reduce_mean(x, 1, keepdims=True),
        lambda: tf.concat([x[:, 1:], x[:, :1]], 1),
        lambda: x @ tf.constant([[0.3, -0.2], [0.5, 0.1]]),
    )


@add_to(OF_ROWS)
def _across_rows(o):
    x, y, n = o.x, o.rows, size_of(o.x)
    return o.one_of(
        lambda: x - tf.reduce_mean(x, 0),
        lambda: tf.nn.softmax(x @ tf.transpose(y)) @ x,
        lambda: tf.cumsum(x, 0) * 0.3,
        lambda: tf.sort(x, 0),
        lambda: tf.roll(x, 1, 0),
        lambda: x[::-1],
        lambda: tf.concat([x, y], 0)[:n] + tf.concat([y, x], 0)[-n:],
        lambda: tf.gather(tf.concat([x, y], 0), tf.range(n) * 2),
        lambda: tf.reduce_sum(tf.reshape(tf.tile(x, [1, 2]), [n, 2, 2]), 1),
        lambda: x * tf.reduce_max(x),
        lambda: x * tf.boolean_mask(y, tf.range(n) < 1),
        lambda: x * tf.gather(tf.concat([x, y], 0), tf.range(2 * n))[n:],
        lambda: tf.reduce_sum(_pairs(x, y), 0) * 0.02,
    )


# ---- rows by their numbers ---------------------------------------------------


@add_to(OF_ROWS)
def _gathered(o):
    x, k = o.x, o.numbers()
    n, flat = tf.cast(size_of(x), k.dtype), tf.reshape(x, [-1])
    column, at = k % 2, tf.range(size_of(x), dtype=k.dtype)
    return o.one_of(
        lambda: tf.gather(x, k % n),
        lambda: tf.gather(x, tf.clip_by_value(k, 0, n - 1)),
        lambda: tf.gather_nd(x, tf.stack([at, column], 1))[:, None] * x,
        lambda: tf.gather_nd(x, tf.stack([k % n, column], 1))[:, None] * x,
        lambda: tf.gather(x, column, batch_dims=1)[:, None] + o.rows,
        lambda: tf.gather(flat, at * 2 + column)[:, None] * x,
        lambda: tf.gather(flat, (k * 2 + column) % (2 * n))[:, None] * x,
        lambda: (
            tf.gather_nd(x @ tf.transpose(x), tf.stack([k, at], 1) % n)[:, None]
            * x
        ),
        lambda: tf.gather(tf.eye(SEGMENTS, 2), k % SEGMENTS) * x,
        lambda: tf.tanh(tf.cast(k, tf.float32))[:, None] * x,
    )


@add_to(OF_ROWS)
def _entries(o):
    """Some entries of rows, by their places."""
    x, y, n = o.x, o.rows, size_of(o.x)
    mask = o.one_of(lambda: x > 0, lambda: tf.abs(y) > 0.3, lambda: x > y)
    at = tf.where(mask)
    some = o.one_of(
        lambda: tf.gather_nd(y, at),
        lambda: tf.boolean_mask(x, mask) * 0.5,
        lambda: tf.gather_nd(tf.tile(x, [2, n]), at[:, ::-1]),
        lambda: tf.gather(x[:, 0], at[:, 0]) * tf.gather(y[:, 1], at[:, -2]),
        lambda: tf.cast(at[:, 1], tf.float32),
    )
    wider = tf.scatter_nd(at, some, tf.cast([n + 1, 3], tf.int64))
    return o.one_of(
        lambda: tf.scatter_nd(at, some, tf.shape(x, tf.int64)),
        lambda: tf.tensor_scatter_nd_update(y, at, some),
        lambda: wider[:n, 1:],
        lambda: tf.reduce_sum(some) * 0.1 * x,
        lambda: tf.math.unsorted_segment_sum(some, at[:, 1], 2) * 0.1,
        lambda: tf.reduce_sum(tf.gather(x, tf.reshape(at, [-1]) % 1), 0) * 0.1,
        lambda: tf.reduce_sum(tf.math.segment_sum(some, at[:, 0])) * 0.1 * x,
    )


@add_to(OF_ROWS)
def _segments(o):
    x, k, n = o.x, o.numbers(), size_of(o.x)
    k = tf.cast(k, tf.int32)
    count = o.draw.choice([SEGMENTS, n, n + 1, 2 * n])
    name = o.draw.choice(["sum", "mean", "max", "min", "prod"])
    if o.draw.random() < 0.3:
        k = o.one_of(
            lambda: tf.sort(k % count),
            lambda: tf.repeat(tf.range(n), 2)[::2],
            lambda: tf.range(n) * 2 + 1,
        )
        found = getattr(tf.math, f"segment_{name}")(x, k)
    else:
        k = o.one_of(
            lambda: k % count,
            lambda: tf.where(k < count, k, -1),
            lambda: tf.minimum(k, 0) - 1,
        )
        found = getattr(tf.math, f"unsorted_segment_{name}")(x, k, count)
    found = bounded(found)
    return o.one_of(
        lambda: tf.gather(found, tf.maximum(k, 0)),
        lambda: tf.reduce_sum(found, 0) * 0.1,
        lambda: tf.gather(found, k % size_of(found)) * x,
    )


@add_to(OF_ROWS)
def _scattered_rows(o):
    x, y, k, shape = o.x, o.rows, o.numbers(), tf.shape(o.x)
    at = (tf.cast(k, tf.int32) % shape[0])[:, None]
    return o.one_of(
        lambda: tf.scatter_nd(at, x, shape) * 0.5,
        lambda: tf.tensor_scatter_nd_add(y, at, x) * 0.5,
        lambda: tf.tensor_scatter_nd_sub(y, at, x) * 0.5,
        lambda: tf.tensor_scatter_nd_max(y, at, x),
        lambda: tf.scatter_nd(at % 2, x, [2, 2])[1] * 0.3,
    )


@add_to(OF_ROWS)
def _masked(o):
    x, y, mask, shape = o.x, o.rows, o.mask(), tf.shape(o.x)
    some, others = tf.boolean_mask(x, mask), tf.boolean_mask(y, mask)
    number = o.one_of(
        lambda: tf.cast(tf.where(mask)[:, 0], tf.int32),
        lambda: tf.boolean_mask(tf.range(shape[0]), mask),
    )
    count = tf.cast(size_of(some), tf.float32)
    some = o.one_of(
        lambda: tf.tanh(some),
        lambda: some * others,
        lambda: some - tf.reduce_sum(some, 0) / (count + 1.0),
        lambda: tf.gather(some, tf.range(size_of(some))),
        lambda: some[::-1],
        lambda: some + some[:1],
        lambda: some * tf.gather(y, number),
        lambda: tf.cumsum(some) * 0.3,
    )
    return o.one_of(
        lambda: tf.scatter_nd(number[:, None], some, shape),
        lambda: tf.tensor_scatter_nd_update(x, number[:, None], some),
        lambda: tf.math.unsorted_segment_sum(some, number, shape[0]),
        lambda: tf.math.divide_no_nan(tf.reduce_sum(some, 0), count),
        lambda: bounded(tf.reduce_max(some, 0)),
        lambda: bounded(tf.reduce_prod(some, 0)),
        lambda: tf.reduce_sum(tf.concat([some, some * 2], 0), 0) * 0.1,
        lambda: tf.reduce_sum(tf.math.segment_sum(some, number), 0) * 0.1,
        lambda: tf.reduce_sum(tf.boolean_mask(some, some[:, 0] > 0), 0) * 0.1,
    )


@add_to(OF_ROWS)
def _parted(o):
    x, part = o.x, tf.cast(o.numbers(), tf.int32) % 2
    one, two = tf.dynamic_partition(x, part, 2)
    places = tf.dynamic_partition(tf.range(size_of(x)), part, 2)
    return o.one_of(
        lambda: tf.dynamic_stitch(places, [one * 0.5, tf.tanh(two)]),
        lambda: tf.dynamic_stitch(places[::-1], [two, one * one]),
        lambda: tf.reduce_sum(one, 0) * 0.1 - tf.reduce_sum(two * two, 0) * 0.1,
        lambda: tf.concat([one, two], 0),
    )


@add_to(OF_ROWS)
def _ragged(o):
    x, n = o.x, size_of(o.x)
    lengths = o.one_of(
        lambda: tf.maximum(o.classes, 0),
        lambda: tf.cast(o.numbers() % 3, tf.int32),
        lambda: tf.cast(o.ragged.row_lengths(), tf.int32)[::-1],
        lambda: tf.cast(tf.fill([n], 2), tf.int8),
    )
    ragged = o.one_of(
        lambda: o.ragged,
        lambda: _repeated(tf.repeat(x, lengths, axis=0), lengths),
        lambda: _repeated(
            tf.gather(x, tf.repeat(tf.range(n), lengths)), lengths
        ),
    )
    values = ragged.values
    row = ragged.value_rowids()
    ragged = ragged.with_values(
        o.one_of(
            lambda: values * 0.5,
            lambda: values * tf.gather(o.rows, row),
            lambda: tf.roll(values, 1, 0) * 0.5,
            lambda: tf.tanh(tf.cumsum(values)),
        )
    )
    count = tf.cast(ragged.row_lengths(), tf.float32)[:, None]
    return o.one_of(
        lambda: tf.reduce_sum(ragged, 1) * 0.3,
        lambda: tf.math.divide_no_nan(tf.reduce_sum(ragged, 1), count),
        lambda: bounded(tf.reduce_max(ragged, 1)),
        lambda: ragged.to_tensor(shape=(None, 3, 2))[:, 1],
        # The mean is of the longest row of all.
        lambda: tf.reduce_mean(ragged.to_tensor(), 1) * 0.3,
        lambda: tf.reduce_sum(tf.tanh(ragged.values), 0) * 0.1,
        lambda: tf.cast(ragged.bounding_shape()[1], tf.float32) * 0.1 * x,
        lambda: tf.cast(ragged.row_splits[1:], tf.float32)[:, None] * 0.1 * x,
        lambda: tf.math.unsorted_segment_sum(ragged.values, row, n) * 0.3,
    )
