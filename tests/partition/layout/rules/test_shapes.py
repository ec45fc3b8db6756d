"""How towers have the results of operations on shapes and axes."""

import tensorflow as tf

from tests.partition.kit import partial_sum, replicated, sharded
from tests.partition.layout.rules.cases.case import axis_size, raw_op
from tests.partition.layout_list import as_listed

X, W, TOTAL = sharded(-1, 4, 6), replicated(4, 6), partial_sum(4, 6)
COLUMNS, ROWS = sharded(4, -1), sharded(-1, 6)
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
    "rows joined with a later axis": (_reshaped(-1), X),
    "rows joined with a later axis, in turn": (_reshaped(-1, 6), X),
    "a later axis split": (_reshaped(_n, 2, 2, 6), X),
    "an axis before the rows": (_reshaped(1, -1, 24), X),
    "an axis before the rows joined": (_reshaped(-1), COLUMNS),
    "an axis before the rows split": (_reshaped(2, 2, -1), COLUMNS),
    "blocks apart": (_reshaped(2, -1, 4), VIEWS),
    "blocks joined again": lambda views: tf.reshape(
        tf.reshape(views, [2, -1, 4]), [-1, 4]
    ),
    "rows of a unit apart": (_reshaped(-1, 2, 4), PAIRS),
    "rows of a unit in blocks": (_reshaped(2, -1), PAIRS),
    "a sum": (_reshaped(3, 8), TOTAL),
    "words of texts joined": (_reshaped(-1, 4), TEXTS),
    "words of texts apart again": lambda texts: tf.reshape(
        tf.reshape(texts, [-1, 4]), tf.shape(texts)
    ),
    "an unknown size from the rest": (_reshaped(_n, -1), TEXTS),
}


test_reshape = as_listed("shapes: reshape", RESHAPE)


SHAPE = {
    "Size": (raw_op("Size"), X),
    "Size of texts": (raw_op("Size"), TEXTS),
    "Fill with rows": lambda x: tf.fill([_n(x), 3], 2.0),
    "Fill with twice the rows": lambda x: tf.fill([3, _pairs(x)], 2.0),
    "Fill with the square": lambda x: tf.fill([_n(x), _n(x)], 2.0),
    "BroadcastTo rows": lambda x, w: tf.broadcast_to(w, [_n(x), 4, 6]),
    "BroadcastTo of a single row": lambda rows: tf.broadcast_to(
        rows[:1, :1], [3, 6]
    ),
    "BroadcastTo meets rows": lambda x, w: (
        tf.broadcast_to(w, [_n(x), 4, 6]) * x
    ),
    "Tile of rows": lambda x: tf.tile(x, [2, 1, 1]),
    "Tile to rows": lambda x, w: tf.tile(w[:1], [_pairs(x), 2]),
    "Range to the rows": lambda x: tf.range(_n(x)),
    "Range by twos": lambda x: tf.range(0, _pairs(x), 2),
    "Range from 1": lambda x: tf.range(1, _n(x) + 1),
}


test_shapes = as_listed("shapes: shape", SHAPE)


AXES = {
    "Squeeze of all": (tf.squeeze, sharded(1, -1, 1, examples=5)),
    "Squeeze of none": (tf.squeeze, sharded(-1, 4, examples=5)),
    "OneHot of the batch": lambda numbers: tf.one_hot(
        numbers[:, 0], _n(numbers)
    ),
    "ConcatV2 of rows": lambda x: tf.concat([x, 2 * x, x], 0),
    "ConcatV2 of rows and views": (
        lambda x, v: tf.concat([x, v], 0),
        sharded(-1, 4),
        VIEWS,
    ),
    "ConcatV2 of rows and of none": lambda rows, w: tf.concat([rows, w], 0),
    "ConcatV2 of rows and what has as many": lambda rows: tf.concat(
        [rows, tf.ones([_n(rows), 6])], 0
    ),
    "ConcatV2 of texts": lambda texts: tf.concat([texts, texts[:, :1]], 1),
}


test_axes = as_listed("shapes: axes", AXES)
