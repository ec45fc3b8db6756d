"""How towers have slices, splits and padded tensors."""

import tensorflow as tf

from tests.partition.kit import partial_sum, replicated, sharded
from tests.partition.layout.rules.cases.case import axis_size, gradient_of
from tests.partition.layout_list import as_listed

X, ROWS = sharded(-1, 4, 6), sharded(-1, 4)
TOTAL, PART = partial_sum(4, 6), partial_sum(3, 6)
VIEWS = sharded(-1, 4, blocks=3)
PAIRS = sharded(-1, 4, rows=2)
TEXTS = sharded(-1, 3, 4, hidden=(1,))
START = replicated(2, dtype="int32", low=0, high=0)
WHOLE = replicated(4, 6)


def _views(x):
    """The number of rows of a view; one of 32 bits might wrap around."""
    return tf.shape(x, tf.int64)[0] // 3


SLICES = {
    "StridedSlice of other axes": lambda x: x[:, 1:3, ::2],
    "StridedSlice with a new axis": lambda x: x[:, None, ..., 1],
    "StridedSlice from the end": lambda x: x[:, -2:, :-1],
    "StridedSlice of all rows": lambda x: x[0 : axis_size(x)],
    "StridedSlice of the first view": lambda views: views[: _views(views)],
    "StridedSlice of the other views": lambda views: views[_views(views) :],
    "StridedSlice of a row": lambda x: x[:1],
    "StridedSlice of every second row": lambda pairs: pairs[::2],
    "StridedSlice of a view's column": lambda views: views[: _views(views), 1],
    "StridedSlice of words": lambda texts: texts[:, 1:],
    "StridedSlice of every second word": lambda texts: texts[:, ::2],
    "Slice from unknown indices": lambda x, start: tf.slice(
        x, tf.concat([[0], start], 0), [axis_size(x), 2, 6]
    ),
    "Slice of rows from unknown indices": lambda x, start: tf.slice(
        x, tf.concat([start[:1], start], 0), [axis_size(x), 2, 6]
    ),
    "Slice of the last view": lambda views: tf.slice(
        views, [2 * _views(views), 0], [_views(views), -1]
    ),
    "Split of rows": lambda views: tf.split(views, 3)[1:],
    "Split of rows of a unit": lambda pairs: tf.split(pairs, 2),
    "SplitV of rows": lambda views: tf.split(
        views, tf.stack([_views(views), -1])
    ),
}


test_slices = as_listed("slices: slices", SLICES)


PADS = {
    "Pad of rows by a row": lambda rows: tf.pad(rows, [[1, 0], [0, 0]]),
    "Pad of rows by views": lambda rows: tf.pad(
        rows, [[axis_size(rows), 2 * axis_size(rows)], [0, 0]]
    ),
    "PadV2 of a sum": lambda total: tf.pad(
        total, [[1, 0], [0, 0]], constant_values=7.0
    ),
    "StridedSliceGrad of a dropped axis": (
        gradient_of(lambda x: x[:, 1]),
        X,
        sharded(-1, 6),
    ),
    "StridedSliceGrad of a view": (
        gradient_of(lambda x: x[_views(x) : 2 * _views(x)]),
        VIEWS,
        ROWS,
    ),
    "StridedSliceGrad of a sum": lambda whole, part: tf.gradients(
        whole[1:], whole, part
    ),
}


test_pads = as_listed("slices: pads", PADS)
