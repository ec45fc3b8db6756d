"""Entries of examples that are picked and added up by their places."""

import pytest
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import check, gradients, proven, ragged, refused, rows

# Uneven, and towers that are left nothing by a mask.
TOWERS = ((5, 2), (2, 3, 1), (1, 1, 1, 4))
_X = rows(-1, 4, 3)
_Y = rows(-1, 3)


def _whole(*shape, high=3, **options):
    return rows(*shape, dtype="int32", low=0, high=high, **options)


def _of(*pieces):
    values, splits = pieces
    return tf.RaggedTensor.from_row_splits(
        values @ tf.ones([2, 3]), splits, validate=False
    )


def _size(t, dtype=tf.int32):
    return tf.shape(t, dtype)[0]


def _numbers(t):
    return tf.range(_size(t))


def _masked(t):
    return tf.boolean_mask(t, t[:, 0] > 0)


def _chosen(y):
    return tf.cast(y[:, 0] > 0, tf.int32)


def _flat(t):
    return tf.reshape(t, [-1, 3])


def _messages(x, y):
    """Along the edges of graphs that are put together."""
    edges = tf.where(tf.abs(x) > 0.3)
    source = edges[:, 0] * 4 + edges[:, 1]
    target = edges[:, 0] * 4 + edges[:, 2]
    sums = tf.math.unsorted_segment_sum(
        tf.gather(_flat(x), source), target, 4 * _size(x, tf.int64)
    )
    return tf.reshape(sums, [-1, 4, 3]) + y[:, None]


def _dispatched(x, y):
    choice = _chosen(y)
    one, two = tf.dynamic_partition(y, choice, 2)
    places = tf.dynamic_partition(_numbers(y), choice, 2)
    return tf.dynamic_stitch(places, [one**2, tf.tanh(two)])


def _nearest(x, y):
    best = tf.argmax(x[:, :, 0], 1)
    number = tf.range(_size(x, tf.int64))
    return tf.gather(_flat(x), number * 4 + best) + y


def _of_numbers(x, y):
    number = tf.repeat(_numbers(x), 4)
    again, rest = number * 8 // 8, (number * 4 + 2) % 4
    same = tf.cast(again == number, tf.float32) * tf.cast(rest, tf.float32)
    return tf.gather(y, again) * same[:, None]


_EXAMPLES = {
    "repeated numbers": lambda x, y: tf.math.segment_mean(
        _flat(x), tf.repeat(_numbers(x), 4)
    ),
    "largest by numbers": lambda x, y: tf.math.segment_max(
        _flat(x), tf.repeat(_numbers(x), 4)
    ),
    "messages": _messages,
    "dispatched": _dispatched,
    "nearest": _nearest,
    "numbers": _of_numbers,
    "matrix of each": lambda x, y: (
        x[:, 1:]
        * tf.scatter_nd(
            _numbers(y)[:, None, None] * [1, 0, 0]
            + tf.tile([[[0, 1, 2], [0, 2, 0]]], [_size(y), 1, 1]),
            y[:, :2],
            [_size(y), 3, 3],
        )
    ),
    "vectorized": lambda x, y: tf.vectorized_map(
        lambda t: tf.linalg.matvec(t[1:] + tf.eye(3), t[0]), x
    ),
    "pick by number": lambda x, y: tf.gather_nd(
        x, tf.stack([_numbers(x), tf.argmax(y, 1, tf.int32)], 1)
    ),
}


@pytest.mark.parametrize("function", _EXAMPLES.values(), ids=_EXAMPLES)
def test_by_places(function):
    assert proven(function, _X, _Y, towers=TOWERS).rows.unit is None
    for value in check(gradients(function), _X, _Y, towers=TOWERS):
        assert value.kind is Kind.ROWS and value.degree == -1


_MASKED = {
    "examples": lambda x, y: tf.boolean_mask(x, y[:, 0] > 0),
    "entries": lambda x, y: tf.boolean_mask(x, x[:, :, 0] > 0),
    "twice": lambda x, y: (
        lambda m: tf.boolean_mask(x, m) * tf.boolean_mask(y, m)[:, None]
    )(y[:, 0] > 0),
    "blocks": lambda x, y: tf.gather(_flat(x), tf.where(_flat(x)[:, 0] > 0)),
    "part": lambda x, y: tf.dynamic_partition(x, _chosen(y), 2)[1],
}


@pytest.mark.parametrize("function", _MASKED.values(), ids=_MASKED)
def test_what_a_mask_leaves(function):
    """It is in order, adds up, and has gradients that go where it was."""
    assert proven(function, _X, _Y, towers=TOWERS).rows.unit is not None

    def sums(x, y):
        some = function(x, y)
        share = tf.cast(tf.shape(some)[0], tf.float32) / tf.cast(
            tf.shape(x)[0], tf.float32
        )
        whole = tf.reduce_sum(tf.tanh(some))
        return whole, share, *tf.gradients(whole, [x])

    whole, share, gradient = check(sums, _X, _Y, towers=TOWERS)
    assert whole.kind is Kind.SUM and whole.degree == 0
    assert share.kind is Kind.SUM and share.degree == -1
    assert gradient.kind is Kind.ROWS or function is _MASKED["part"]


_RAGGED = {
    "sum": lambda r: tf.reduce_sum(r, 1),
    "mean": lambda r: tf.math.divide_no_nan(
        tf.reduce_sum(r, 1), tf.reduce_sum(tf.ones_like(r), 1)
    ),
    "largest": lambda r: tf.maximum(tf.reduce_max(r, 1), -9.0),
    "lengths": lambda r: (
        tf.reduce_sum(r, 1) * tf.cast(r.row_lengths(), tf.float32)[:, None]
    ),
    "dense": lambda r: tf.reduce_sum(r.to_tensor(shape=(None, 5, None)), 1),
    "spread": lambda r: tf.reduce_sum(
        r.with_values(
            r.values * tf.gather(tf.reduce_sum(r, 1), r.value_rowids())
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", _RAGGED)
def test_ragged_rows(name):
    def step(y, *pieces):
        return _RAGGED[name](_of(*pieces)) + y

    given = _Y, *ragged(2)
    assert proven(step, *given, towers=TOWERS).rows.unit is None
    for value in check(gradients(step), *given, towers=TOWERS):
        assert value.kind is Kind.ROWS and value.degree == -1


def _stitched_wrongly(x, y):
    choice = _chosen(y)
    places = tf.dynamic_partition(_numbers(y), choice, 2)
    one, two = (tf.gather(y, place) for place in places)
    return tf.dynamic_stitch(places[::-1], [two, one])


_HOSTILE = {
    "mean of what is left": lambda x, y: tf.reduce_mean(_masked(y)),
    "largest of what is left": lambda x, y: tf.reduce_max(_masked(y), 0),
    "by another mask": lambda x, y: (
        _masked(y)[:1] * tf.boolean_mask(y, y[:, 0] <= 0)
    ),
    "next": lambda x, y: tf.gather(y, (_numbers(y) + 1) % _size(y)),
    "last first": lambda x, y: tf.gather(y, _size(y) - 1 - _numbers(y)),
    "too far": lambda x, y: tf.gather(
        _flat(x), tf.minimum(_numbers(x) * 4 + _chosen(y) * 4, 4 * _size(x) - 1)
    ),
    "overlapping": lambda x, y: tf.gather(
        _flat(x), _numbers(x) * 3 + tf.argmax(x[:, :, 0], 1, tf.int32)
    ),
    "as a number": lambda x, y: y * tf.cast(tf.where(y[:, 0] > -9), tf.float32),
    "of a table": lambda x, y: tf.gather(tf.eye(40), _numbers(y)),
    "of all pairs": lambda x, y: tf.gather(
        y, tf.where(_numbers(y)[:, None] > _numbers(y))[:, 0]
    ),
    "stitched wrongly": _stitched_wrongly,
    "one for few": lambda x, y: tf.gather(
        y, tf.where(_size(y) > 2, _numbers(y), 0)
    ),
    "the diagonal": lambda x, y: tf.gather_nd(
        tf.tile(y, [1, 4]), tf.stack([_numbers(y)] * 2, 1)
    ),
    "by numbers along two axes": lambda x, y: tf.gather_nd(
        tf.tile(y, [1, 8]),
        tf.concat([_numbers(y)[:, None] * k for k in (1, 2)], 1),
    ),
    "of a matrix of numbers": lambda x, y: tf.scatter_nd(
        _numbers(y)[:, None] * [1, 1], y, [_size(y), 9, 3]
    ),
    "not only the number": lambda x, y: tf.gather_nd(
        tf.concat([x, x], 0),
        _numbers(y)[:, None] * [1, 0] + tf.tile([[1, 1]], [_size(y), 1]),
    ),
    "first of some": lambda x, y: tf.boolean_mask(y, y[:, 0] > -9)[:1],
    "sorted": lambda x, y: tf.gather(
        y, tf.cast(tf.sort(tf.where(y[:, 0] > -9), 0, "DESCENDING"), tf.int32)
    ),
    "added up": lambda x, y: tf.gather(
        y, tf.cumsum(tf.ones_like(_numbers(y))) - 1
    ),
}


@pytest.mark.parametrize("function", _HOSTILE.values(), ids=_HOSTILE)
def test_what_may_reach_other_examples(function):
    assert refused(function, _X, _Y, towers=TOWERS)


_HOSTILE_RAGGED = {
    "as long as the longest": lambda r: tf.reduce_mean(r.to_tensor(), 1),
    "mean of all": lambda r: tf.reduce_mean(r.values, 0),
    "first of each": lambda r: tf.gather(
        tf.pad(r.values, [[0, 1], [0, 0]]), r.row_starts()
    ),
    "by the longest": lambda r: (
        tf.reduce_sum(r, 1) / tf.cast(r.bounding_shape()[1], tf.float32)
    ),
    "means of all but the last that are empty": lambda r: tf.math.segment_mean(
        r.values, r.value_rowids()
    ),
    "next": lambda r: tf.reduce_sum(r.with_values(tf.roll(r.values, 1, 0)), 1),
}


@pytest.mark.parametrize("name", _HOSTILE_RAGGED)
def test_ragged_rows_that_meet(name):
    def step(y, *pieces):
        return _HOSTILE_RAGGED[name](_of(*pieces))

    assert refused(step, _Y, *ragged(2), towers=TOWERS)


def _pick(y, at):
    return tf.gather(y, at, axis=1, batch_dims=1)


@pytest.mark.parametrize("of", [(-1, 4), (-1, 4, 3)], ids=str)
@pytest.mark.parametrize("by", [(-1,), (-1, 2), (-1, 2, 2)], ids=str)
def test_gradients_of_picks(of, by):
    value = proven(gradients(_pick), rows(*of), _whole(*by))
    assert value.rows.place == (0, 1, 1) and value.degree == -1


def _added_up(x, at, entries, step):
    """What the gradient does, by hand."""
    n = tf.shape(x)[0]
    places = tf.range(n) * step + at
    return tf.math.unsorted_segment_sum(x, places, n * entries)


_PICKS = {
    "no pick": lambda x, y, at: _added_up(x[:, 0], at, 2, 2),
    "picks from more": lambda x, y, at: (
        _added_up(x, at, 2, 2) + tf.reduce_sum(_pick(y, at))
    ),
    "overlapping": lambda x, y, at: (
        _added_up(x, at, 4, 3) + tf.reduce_sum(_pick(y, at))
    ),
    "other indices": lambda x, y, at: (
        _added_up(x, at + 1, 4, 4) + tf.reduce_sum(_pick(y, at))
    ),
}


@pytest.mark.parametrize("step", _PICKS.values(), ids=_PICKS)
def test_picks_that_may_reach_other_examples(step):
    (value,) = check(step, rows(-1, 3), rows(-1, 4), _whole(-1, high=1))
    assert value.kind is Kind.OTHER


def test_as_many_of_each_example_as_nobody_knows():
    """They may be the same number for all, which is not said to differ."""

    def step(x, y):
        kept = tf.boolean_mask(x, tf.abs(x[:, :, 0]) > -1)
        return tf.reshape(kept, [_size(y), -1, 3])

    (value,) = check(step, _X, _Y, towers=TOWERS)
    assert value.reason is not None and value.reason.is_open
