"""How towers have what is gathered, scattered and summed in segments."""

import tensorflow as tf

from tests.partition.kit import partial_sum, sharded
from tests.partition.layout.rules.cases.case import axis_size, raw_op
from tests.partition.layout_list import as_listed

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
        lambda x, i: tf.gather(x, i, batch_dims=1),
        X,
        PAIRS,
    ),
    "GatherV2 of rows by any": (
        lambda x: tf.gather(x, [0, 0]),
        sharded(-1, 4, examples=5),
    ),
    "GatherV2 of rows by their numbers": (
        lambda x: tf.gather(x, _numbers(x)),
        X,
    ),
    "GatherV2 of rows that a mask leaves": (
        lambda x, m: tf.gather(x, _found(m)[:, 0]),
        X,
        MASK,
    ),
    "GatherV2 of columns by their numbers": (
        lambda x: tf.gather(tf.transpose(x), _numbers(x), axis=1),
        X,
    ),
    "GatherV2 of every second of three rows": (
        lambda x: tf.gather(x, tf.range(0, axis_size(x), 2)),
        sharded(-1, 4, rows=3),
    ),
    "GatherNd of rows": (
        lambda x, i: tf.gather_nd(x, tf.stack([_numbers(x), i], 1)),
        sharded(-1, 5),
        IDS,
    ),
}


test_gathers = as_listed("indexing: gathers", GATHERS)


SCATTERS = {
    "ScatterNd of columns": (
        lambda x: tf.scatter_nd(
            [[0], [2], [4], [1]], tf.transpose(x), [6, axis_size(x)]
        ),
        X,
    ),
    "ScatterNd to rows": (
        lambda x, i: tf.scatter_nd(
            tf.stack([_numbers(x), i], 1), x[:, 0], [axis_size(x), 5]
        ),
        X,
        IDS,
    ),
    "TensorScatterSub from a sum": (
        lambda t, i, x: tf.tensor_scatter_nd_sub(t, i[:, None], x),
        TOTAL,
        IDS,
        X,
    ),
    "TensorScatterAdd to rows": (
        lambda x, i: tf.tensor_scatter_nd_add(
            x, tf.stack([_numbers(x), i], 1), x[:, 0]
        ),
        sharded(-1, 5),
        IDS,
    ),
    "SparseToDense": (
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
        lambda x, m: tf.tensor_scatter_nd_update(
            x, _found(m), tf.boolean_mask(2 * x, m)
        ),
        X,
        MASK,
    ),
    "DynamicStitch": (
        lambda x, i: tf.dynamic_stitch(
            tf.dynamic_partition(_numbers(x), i, 5),
            tf.dynamic_partition(x, i, 5),
        ),
        X,
        IDS,
    ),
    "DynamicStitch of some parts": (
        lambda x, i: tf.dynamic_stitch(
            tf.dynamic_partition(_numbers(x), i, 5)[:1],
            tf.dynamic_partition(x, i, 5)[:1],
        ),
        X,
        IDS,
    ),
}


test_scatters = as_listed("indexing: scatters", SCATTERS)


def _segments(name):
    return lambda x, i: getattr(tf.math, f"unsorted_segment_{name}")(x, i, 5)


SEGMENTS = {
    "UnsortedSegmentSum of columns": (
        lambda x: tf.math.unsorted_segment_sum(
            tf.transpose(x), [0, 1, 0, 1], 2
        ),
        X,
    ),
    "UnsortedSegmentMin of columns": (
        lambda x: tf.math.unsorted_segment_min(
            tf.transpose(x), [0, 1, 0, 1], 2
        ),
        X,
    ),
    "UnsortedSegmentSum to rows": (
        lambda x, m: tf.math.unsorted_segment_sum(
            tf.boolean_mask(x, m), _found(m)[:, 0], tf.shape(x, tf.int64)[0]
        ),
        X,
        MASK,
    ),
    "SegmentSum of all rows": (
        lambda x: tf.math.segment_sum(x, _numbers(x)),
        X,
    ),
    "SegmentSum of some rows": (
        lambda x, m: tf.math.segment_sum(
            tf.boolean_mask(x, m), _found(m)[:, 0]
        ),
        X,
        MASK,
    ),
    "DenseBincount": (
        lambda i: tf.math.bincount(i, minlength=5, maxlength=5),
        IDS,
    ),
    "DenseBincount of a matrix": (
        lambda i: raw_op("DenseBincount", size=5, weights=[0.0] * 0)(i),
        PAIRS,
    ),
    "DenseBincount that is binary": (
        lambda i: raw_op(
            "DenseBincount", size=5, weights=[0.0] * 0, binary_output=True
        )(i),
        IDS,
    ),
    "DenseBincount of a matrix that is binary": (
        lambda i: raw_op(
            "DenseBincount", size=5, weights=[0.0] * 0, binary_output=True
        )(i),
        PAIRS,
    ),
}


test_segments = as_listed("indexing: segments", SEGMENTS)
