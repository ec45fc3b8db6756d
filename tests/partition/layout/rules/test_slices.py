"""How towers have slices, splits and padded tensors."""

import tensorflow as tf

from tests.partition.kit import partial_sum, replicated, sharded
from tests.partition.layout.rules.cases.case import axis_size, gradient_of
from tests.partition.layout_list import as_listed

X, TOTAL = sharded(-1, 4, 6), partial_sum(4, 6)
VIEWS = sharded(-1, 4, blocks=3)
PAIRS = sharded(-1, 4, rows=2)
TEXTS = sharded(-1, 3, 4, hidden=(1,))
START = replicated(2, dtype="int32", low=0, high=0)


def _views(x):
    """The number of rows of a view; one of 32 bits might wrap around."""
    return tf.shape(x, tf.int64)[0] // 3


SLICES = {
    "StridedSlice of other axes": (lambda x: x[:, 1:3, ::2], X),
    "StridedSlice with a new axis": (lambda x: x[:, None, ..., 1], X),
    "StridedSlice from the end": (lambda x: x[:, -2:, :-1], X),
    "StridedSlice of all rows": (lambda x: x[0 : axis_size(x)], X),
    "StridedSlice of the first view": (lambda x: x[: _views(x)], VIEWS),
    "StridedSlice of the other views": (lambda x: x[_views(x) :], VIEWS),
    "StridedSlice of a row": (lambda x: x[:1], X),
    "StridedSlice of every second row": (lambda x: x[::2], PAIRS),
    "StridedSlice of a view's column": (lambda x: x[: _views(x), 1], VIEWS),
    "StridedSlice of words": (lambda x: x[:, 1:], TEXTS),
    "StridedSlice of every second word": (lambda x: x[:, ::2], TEXTS),
    "Slice from unknown indices": (
        lambda x, start: tf.slice(
            x, tf.concat([[0], start], 0), [axis_size(x), 2, 6]
        ),
        X,
        START,
    ),
    "Slice of rows from unknown indices": (
        lambda x, start: tf.slice(
            x, tf.concat([start[:1], start], 0), [axis_size(x), 2, 6]
        ),
        X,
        START,
    ),
    "Slice of the last view": (
        lambda x: tf.slice(x, [2 * _views(x), 0], [_views(x), -1]),
        VIEWS,
    ),
    "Split of rows": (lambda x: tf.split(x, 3)[1:], VIEWS),
    "Split of rows of a unit": (lambda x: tf.split(x, 2), PAIRS),
    "SplitV of rows": (lambda x: tf.split(x, tf.stack([_views(x), -1])), VIEWS),
}


test_slices = as_listed("slices: slices", SLICES)


PADS = {
    "Pad of rows by a row": (
        lambda x: tf.pad(x, [[1, 0], [0, 0]]),
        sharded(-1, 4),
    ),
    "Pad of rows by views": (
        lambda x: tf.pad(x, [[axis_size(x), 2 * axis_size(x)], [0, 0]]),
        sharded(-1, 4),
    ),
    "PadV2 of a sum": (
        lambda t: tf.pad(t, [[1, 0], [0, 0]], constant_values=7.0),
        TOTAL,
    ),
    "StridedSliceGrad of a dropped axis": (
        gradient_of(lambda x: x[:, 1]),
        X,
        sharded(-1, 6),
    ),
    "StridedSliceGrad of a view": (
        gradient_of(lambda x: x[_views(x) : 2 * _views(x)]),
        VIEWS,
        sharded(-1, 4),
    ),
    "StridedSliceGrad of a sum": (
        gradient_of(lambda w: w[1:]),
        replicated(4, 6),
        partial_sum(3, 6),
    ),
}


test_pads = as_listed("slices: pads", PADS)
