"""How towers have slices, splits and padded tensors."""

import tensorflow as tf

from tests.partition.kit import (
    check_described,
    each,
    partial_sum,
    replicated,
    sharded,
)
from tests.partition.rules.cases.case import axis_size, gradient_of

X, TOTAL = sharded(-1, 4, 6), partial_sum(4, 6)
VIEWS = sharded(-1, 4, blocks=3)
PAIRS = sharded(-1, 4, rows=2)
TEXTS = sharded(-1, 3, 4, hidden=(1,))
START = replicated(2, dtype="int32", low=0, high=0)


def _views(x):
    """The number of rows of a view; one of 32 bits might wrap around."""
    return tf.shape(x, tf.int64)[0] // 3


SLICES = {
    "StridedSlice of other axes": (
        "rows 0 of [n, 2, 3]",
        lambda x: x[:, 1:3, ::2],
        X,
    ),
    "StridedSlice with a new axis": (
        "rows 0 of [n, 1, 4]",
        lambda x: x[:, None, ..., 1],
        X,
    ),
    "StridedSlice from the end": (
        "rows 0 of [n, 2, 5]",
        lambda x: x[:, -2:, :-1],
        X,
    ),
    "StridedSlice of all rows": (
        "rows 0 of [n, 4, 6]",
        lambda x: x[0 : axis_size(x)],
        X,
    ),
    "StridedSlice of the first view": (
        "rows 0 of [n, 4]",
        lambda x: x[: _views(x)],
        VIEWS,
    ),
    "StridedSlice of the other views": (
        "rows 0 of [2*n, 4] in 2 blocks",
        lambda x: x[_views(x) :],
        VIEWS,
    ),
    "StridedSlice of a row": (
        "whole [?, 4, 6]: StridedSlice",
        lambda x: x[:1],
        X,
    ),
    "StridedSlice of every second row": (
        "whole [?, 4]: StridedSlice",
        lambda x: x[::2],
        PAIRS,
    ),
    "StridedSlice of a view's column": (
        "rows 0 of [n]: StridedSlice",
        lambda x: x[: _views(x), 1],
        VIEWS,
    ),
    "StridedSlice of words": ("rows 0 of [n, ?, 4]", lambda x: x[:, 1:], TEXTS),
    "StridedSlice of every second word": (
        "rows 0 of [n, ?, 4]",
        lambda x: x[:, ::2],
        TEXTS,
    ),
    "Slice from unknown indices": (
        "rows 0 of [n, 2, 6]: Slice",
        lambda x, start: tf.slice(
            x, tf.concat([[0], start], 0), [axis_size(x), 2, 6]
        ),
        X,
        START,
    ),
    "Slice of rows from unknown indices": (
        "rows 0 of [n, 2, 6]: Slice",
        lambda x, start: tf.slice(
            x, tf.concat([start[:1], start], 0), [axis_size(x), 2, 6]
        ),
        X,
        START,
    ),
    "Slice of the last view": (
        "rows 0 of [n, 4]",
        lambda x: tf.slice(x, [2 * _views(x), 0], [_views(x), -1]),
        VIEWS,
    ),
    "Split of rows": (
        "rows 0 of [n, 4], rows 0 of [n, 4]",
        lambda x: tf.split(x, 3)[1:],
        VIEWS,
    ),
    "Split of rows of a unit": (
        "whole [?, 4], whole [?, 4]: Split",
        lambda x: tf.split(x, 2),
        PAIRS,
    ),
    "SplitV of rows": (
        "rows 0 of [n, 4], rows 0 of [2*n, 4] in 2 blocks",
        lambda x: tf.split(x, tf.stack([_views(x), -1])),
        VIEWS,
    ),
}


@each(SLICES)
def test_slices(case):
    check_described(*case)


PADS = {
    "Pad of rows by a row": (
        "whole [n+1, 4]: Pad",
        lambda x: tf.pad(x, [[1, 0], [0, 0]]),
        sharded(-1, 4),
    ),
    "Pad of rows by views": (
        "rows 0 of [4*n, 4] in 4 blocks",
        lambda x: tf.pad(x, [[axis_size(x), 2 * axis_size(x)], [0, 0]]),
        sharded(-1, 4),
    ),
    "PadV2 of a sum": (
        "whole [5, 6]",
        lambda t: tf.pad(t, [[1, 0], [0, 0]], constant_values=7.0),
        TOTAL,
    ),
    "StridedSliceGrad of a dropped axis": (
        "rows 0 of [n, 4, 6]",
        gradient_of(lambda x: x[:, 1]),
        X,
        sharded(-1, 6),
    ),
    "StridedSliceGrad of a view": (
        "rows 0 of [3*n, 4] in 3 blocks",
        gradient_of(lambda x: x[_views(x) : 2 * _views(x)]),
        VIEWS,
        sharded(-1, 4),
    ),
    "StridedSliceGrad of a sum": (
        "sum of [4, 6]",
        gradient_of(lambda w: w[1:]),
        replicated(4, 6),
        partial_sum(3, 6),
    ),
}


@each(PADS)
def test_pads(case):
    check_described(*case)
