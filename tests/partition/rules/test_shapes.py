"""How towers have the results of operations on shapes and axes."""

import tensorflow as tf

from tests.partition.kit import (
    check_described,
    each,
    partial_sum,
    replicated,
    sharded,
)
from tests.partition.rules.cases.case import axis_size, raw_op

X, W, TOTAL = sharded(-1, 4, 6), replicated(4, 6), partial_sum(4, 6)
COLUMNS = sharded(4, -1)
VIEWS, PAIRS = sharded(-1, 4, blocks=2), sharded(-1, 4, rows=2)
TEXTS = sharded(-1, 3, 4, hidden=(1,))
NUMBERS = sharded(-1, 4, dtype="int32", low=0, high=3)


def _reshaped(*sizes):
    def function(x):
        own = [size(x) if callable(size) else size for size in sizes]
        return tf.reshape(x, own)

    return function


def _n(x):
    return axis_size(x)


def _pairs(x):
    return 2 * axis_size(x)


RESHAPE = {
    "rows joined with a later axis": ("rows 0 of [24*n]", _reshaped(-1), X),
    "rows joined with a later axis, in turn": (
        "rows 0 of [4*n, 6]",
        _reshaped(-1, 6),
        X,
    ),
    "a later axis split": ("rows 0 of [n, 2, 2, 6]", _reshaped(_n, 2, 2, 6), X),
    "an axis before the rows": (
        "rows 1 of [1, n, 24]",
        _reshaped(1, -1, 24),
        X,
    ),
    "an axis before the rows joined": (
        "rows 0 of [4*n] in 4 blocks",
        _reshaped(-1),
        COLUMNS,
    ),
    "an axis before the rows split": (
        "rows 2 of [2, 2, n]",
        _reshaped(2, 2, -1),
        COLUMNS,
    ),
    "blocks apart": ("rows 1 of [2, n, 4]", _reshaped(2, -1, 4), VIEWS),
    "blocks joined again": (
        "rows 0 of [2*n, 4] in 2 blocks",
        lambda x: tf.reshape(tf.reshape(x, [2, -1, 4]), [-1, 4]),
        VIEWS,
    ),
    "rows of a unit apart": ("rows 0 of [n, 2, 4]", _reshaped(-1, 2, 4), PAIRS),
    "rows of a unit in blocks": (
        "rows 1 of [2, 4*n]: Reshape",
        _reshaped(2, -1),
        PAIRS,
    ),
    "a sum": ("sum of [3, 8]", _reshaped(3, 8), TOTAL),
    "words of texts joined": ("rows 0 of [0.1*n, 4]", _reshaped(-1, 4), TEXTS),
    "words of texts apart again": (
        "rows 0 of [n, 0.1, 4]",
        lambda x: tf.reshape(tf.reshape(x, [-1, 4]), tf.shape(x)),
        TEXTS,
    ),
    "an unknown size from the rest": (
        "rows 0 of [n, 4*0.1]",
        _reshaped(_n, -1),
        TEXTS,
    ),
}


@each(RESHAPE)
def test_reshape(case):
    check_described(*case)


SHAPE = {
    "Size": ("whole []", raw_op("Size"), X),
    "Size of texts": ("whole []", raw_op("Size"), TEXTS),
    "Fill with rows": (
        "rows 0 of [n, 3]",
        lambda x: tf.fill([_n(x), 3], 2.0),
        X,
    ),
    "Fill with twice the rows": (
        "rows 1 of [3, 2*n]",
        lambda x: tf.fill([3, _pairs(x)], 2.0),
        X,
    ),
    "Fill with the square": (
        "rows 0 of [n, n]",
        lambda x: tf.fill([_n(x), _n(x)], 2.0),
        X,
    ),
    "BroadcastTo rows": (
        "rows 0 of [n, 4, 6]",
        lambda x, w: tf.broadcast_to(w, [_n(x), 4, 6]),
        X,
        W,
    ),
    "BroadcastTo of a single row": (
        "whole [3, 6]: StridedSlice",
        lambda x: tf.broadcast_to(x[:1, :1], [3, 6]),
        sharded(-1, 6),
    ),
    "BroadcastTo meets rows": (
        "rows 0 of [n, 4, 6]",
        lambda x, w: tf.broadcast_to(w, [_n(x), 4, 6]) * x,
        X,
        W,
    ),
    "Tile of rows": (
        "rows 0 of [2*n, 4, 6]: Tile",
        lambda x: tf.tile(x, [2, 1, 1]),
        X,
    ),
    "Tile to rows": (
        "rows 0 of [2*n, 12]",
        lambda x, w: tf.tile(w[:1], [_pairs(x), 2]),
        X,
        W,
    ),
    "Range to the rows": ("whole [n]", lambda x: tf.range(_n(x)), X),
    "Range by twos": ("whole [n]", lambda x: tf.range(0, _pairs(x), 2), X),
    "Range from 1": ("whole [?]", lambda x: tf.range(1, _n(x) + 1), X),
}


@each(SHAPE)
def test_shapes(case):
    check_described(*case)


AXES = {
    "Squeeze of all": (
        "rows 0 of [5]",
        tf.squeeze,
        sharded(1, -1, 1, examples=5),
    ),
    "Squeeze of none": (
        "rows 0 of [5, 4]",
        tf.squeeze,
        sharded(-1, 4, examples=5),
    ),
    "OneHot of the batch": (
        "rows 0 of [n, n]",
        lambda i: tf.one_hot(i[:, 0], _n(i)),
        NUMBERS,
    ),
    "ConcatV2 of rows": (
        "rows 0 of [3*n, 4, 6] in 3 blocks",
        lambda x: tf.concat([x, 2 * x, x], 0),
        X,
    ),
    "ConcatV2 of rows and views": (
        "rows 0 of [3*n, 4] in 3 blocks",
        lambda x, v: tf.concat([x, v], 0),
        sharded(-1, 4),
        VIEWS,
    ),
    "ConcatV2 of rows and of none": (
        "whole [?, 6]: ConcatV2",
        lambda x, w: tf.concat([x, w], 0),
        sharded(-1, 6),
        W,
    ),
    "ConcatV2 of rows and what has as many": (
        "rows 0 of [2*n, 6] in 2 blocks",
        lambda x: tf.concat([x, tf.ones([_n(x), 6])], 0),
        sharded(-1, 6),
    ),
    "ConcatV2 of texts": (
        "rows 0 of [n, ?, 4]",
        lambda t: tf.concat([t, t[:, :1]], 1),
        TEXTS,
    ),
}


@each(AXES)
def test_axes(case):
    check_described(*case)
