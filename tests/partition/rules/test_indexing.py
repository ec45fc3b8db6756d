"""How towers have what is gathered, scattered and summed in segments."""

import tensorflow as tf

from tests.partition.kit import (
    check_described,
    each,
    partial_sum,
    sharded,
)
from tests.partition.rules.cases.case import axis_size, raw_op

X, TOTAL = sharded(-1, 4), partial_sum(5, 4)
IDS = sharded(-1, dtype="int32", low=0, high=4)
PAIRS = sharded(-1, 2, dtype="int32", low=0, high=3)
MASK = sharded(-1, dtype="bool")


def _numbers(x):
    return tf.range(axis_size(x))


def _found(mask):
    """The numbers of the rows that a mask leaves."""
    return tf.where(mask)


GATHERS = {
    "GatherV2 of each row": (
        "rows 0 of [n, 2]",
        lambda x, i: tf.gather(x, i, batch_dims=1),
        X,
        PAIRS,
    ),
    "GatherV2 of rows by any": (
        "whole [2, 4]: GatherV2",
        lambda x: tf.gather(x, [0, 0]),
        sharded(-1, 4, examples=5),
    ),
    "GatherV2 of rows by their numbers": (
        "rows 0 of [n, 4]",
        lambda x: tf.gather(x, _numbers(x)),
        X,
    ),
    "GatherV2 of rows that a mask leaves": (
        "rows 0 of [*found0, 4]",
        lambda x, m: tf.gather(x, _found(m)[:, 0]),
        X,
        MASK,
    ),
    "GatherV2 of columns by their numbers": (
        "rows 1 of [4, n]",
        lambda x: tf.gather(tf.transpose(x), _numbers(x), axis=1),
        X,
    ),
    "GatherV2 of every second of three rows": (
        "whole [?, 4]: GatherV2",
        lambda x: tf.gather(x, tf.range(0, axis_size(x), 2)),
        sharded(-1, 4, rows=3),
    ),
    "GatherNd of rows": (
        "rows 0 of [n]",
        lambda x, i: tf.gather_nd(x, tf.stack([_numbers(x), i], 1)),
        sharded(-1, 5),
        IDS,
    ),
}


@each(GATHERS)
def test_gathers(case):
    check_described(*case)


SCATTERS = {
    "ScatterNd of columns": (
        "rows 1 of [6, n]: ScatterNd",
        lambda x: tf.scatter_nd(
            [[0], [2], [4], [1]], tf.transpose(x), [6, axis_size(x)]
        ),
        X,
    ),
    "ScatterNd to rows": (
        "rows 0 of [n, 5]",
        lambda x, i: tf.scatter_nd(
            tf.stack([_numbers(x), i], 1), x[:, 0], [axis_size(x), 5]
        ),
        X,
        IDS,
    ),
    "TensorScatterSub from a sum": (
        "sum of [5, 4]",
        lambda t, i, x: tf.tensor_scatter_nd_sub(t, i[:, None], x),
        TOTAL,
        IDS,
        X,
    ),
    "TensorScatterAdd to rows": (
        "rows 0 of [n, 5]",
        lambda x, i: tf.tensor_scatter_nd_add(
            x, tf.stack([_numbers(x), i], 1), x[:, 0]
        ),
        sharded(-1, 5),
        IDS,
    ),
    "SparseToDense": (
        "rows 0 of [n]",
        lambda x, m: tf.raw_ops.SparseToDense(
            sparse_indices=_found(m),
            output_shape=tf.shape(m, tf.int64),
            sparse_values=tf.boolean_mask(x, m)[:, 0],
            default_value=7.0,
        ),
        X,
        MASK,
    ),
    "TensorScatterUpdate of rows": (
        "rows 0 of [n, 4]",
        lambda x, m: tf.tensor_scatter_nd_update(
            x, _found(m), tf.boolean_mask(2 * x, m)
        ),
        X,
        MASK,
    ),
    "DynamicStitch": (
        "rows 0 of [n, 4]",
        lambda x, i: tf.dynamic_stitch(
            tf.dynamic_partition(_numbers(x), i, 5),
            tf.dynamic_partition(x, i, 5),
        ),
        X,
        IDS,
    ),
    "DynamicStitch of some parts": (
        "whole [?, 4]: DynamicStitch",
        lambda x, i: tf.dynamic_stitch(
            tf.dynamic_partition(_numbers(x), i, 5)[:1],
            tf.dynamic_partition(x, i, 5)[:1],
        ),
        X,
        IDS,
    ),
}


@each(SCATTERS)
def test_scatters(case):
    check_described(*case)


def _segments(name):
    return lambda x, i: getattr(tf.math, f"unsorted_segment_{name}")(x, i, 5)


SEGMENTS = {
    "UnsortedSegmentSum of columns": (
        "rows 1 of [2, n]",
        lambda x: tf.math.unsorted_segment_sum(
            tf.transpose(x), [0, 1, 0, 1], 2
        ),
        X,
    ),
    "UnsortedSegmentMin of columns": (
        "rows 1 of [2, n]",
        lambda x: tf.math.unsorted_segment_min(
            tf.transpose(x), [0, 1, 0, 1], 2
        ),
        X,
    ),
    "UnsortedSegmentSum to rows": (
        "rows 0 of [n, 4]",
        lambda x, m: tf.math.unsorted_segment_sum(
            tf.boolean_mask(x, m), _found(m)[:, 0], tf.shape(x, tf.int64)[0]
        ),
        X,
        MASK,
    ),
    "SegmentSum of all rows": (
        "rows 0 of [n, 4]",
        lambda x: tf.math.segment_sum(x, _numbers(x)),
        X,
    ),
    "SegmentSum of some rows": (
        "whole [?, 4]: SegmentSum",
        lambda x, m: tf.math.segment_sum(
            tf.boolean_mask(x, m), _found(m)[:, 0]
        ),
        X,
        MASK,
    ),
    "DenseBincount": (
        "sum of [?]",
        lambda i: tf.math.bincount(i, minlength=5, maxlength=5),
        IDS,
    ),
    "DenseBincount of a matrix": (
        "rows 0 of [n, 5]",
        lambda i: raw_op("DenseBincount", size=5, weights=[0.0] * 0)(i),
        PAIRS,
    ),
    "DenseBincount that is binary": (
        "whole [5]: DenseBincount",
        lambda i: raw_op(
            "DenseBincount", size=5, weights=[0.0] * 0, binary_output=True
        )(i),
        IDS,
    ),
    "DenseBincount of a matrix that is binary": (
        "rows 0 of [n, 5]",
        lambda i: raw_op(
            "DenseBincount", size=5, weights=[0.0] * 0, binary_output=True
        )(i),
        PAIRS,
    ),
}


@each(SEGMENTS)
def test_segments(case):
    check_described(*case)
