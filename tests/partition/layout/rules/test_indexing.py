"""How towers have what is gathered, scattered and summed in segments."""

import tensorflow as tf

from tests.partition.kit import partial_sum, sharded
from tests.partition.layout.rules.cases.case import axis_size, raw_op
from tests.partition.layout_list import as_listed

X, WIDE, TOTAL = sharded(-1, 4), sharded(-1, 5), partial_sum(5, 4)
IDS = sharded(-1, dtype="int32", low=0, high=4)
PAIRS = sharded(-1, 2, dtype="int32", low=0, high=3)
MASK = sharded(-1, dtype="bool")


def _numbers(x):
    return tf.range(axis_size(x))


def _found(mask):
    """The numbers of the rows that a mask leaves."""
    return tf.where(mask)


GATHERS = {
    "GatherV2 of each row": lambda x, pairs: tf.gather(x, pairs, batch_dims=1),
    "GatherV2 of rows by any": (
        lambda x: tf.gather(x, [0, 0]),
        sharded(-1, 4, examples=5),
    ),
    "GatherV2 of rows by their numbers": lambda x: tf.gather(x, _numbers(x)),
    "GatherV2 of rows that a mask leaves": lambda x, mask: tf.gather(
        x, _found(mask)[:, 0]
    ),
    "GatherV2 of columns by their numbers": lambda x: tf.gather(
        tf.transpose(x), _numbers(x), axis=1
    ),
    "GatherV2 of every second of three rows": (
        lambda x: tf.gather(x, tf.range(0, axis_size(x), 2)),
        sharded(-1, 4, rows=3),
    ),
    "GatherNd of rows": lambda wide, ids: tf.gather_nd(
        wide, tf.stack([_numbers(wide), ids], 1)
    ),
}


test_gathers = as_listed("indexing: gathers", GATHERS)


SCATTERS = {
    "ScatterNd of columns": lambda x: tf.scatter_nd(
        [[0], [2], [4], [1]], tf.transpose(x), [6, axis_size(x)]
    ),
    "ScatterNd to rows": lambda x, ids: tf.scatter_nd(
        tf.stack([_numbers(x), ids], 1), x[:, 0], [axis_size(x), 5]
    ),
    "TensorScatterSub from a sum": lambda total, ids, x: (
        tf.tensor_scatter_nd_sub(total, ids[:, None], x)
    ),
    "TensorScatterAdd to rows": lambda wide, ids: tf.tensor_scatter_nd_add(
        wide, tf.stack([_numbers(wide), ids], 1), wide[:, 0]
    ),
    "SparseToDense": lambda x, mask: tf.raw_ops.SparseToDense(
        sparse_indices=_found(mask),
        output_shape=tf.shape(mask, tf.int64),
        sparse_values=tf.boolean_mask(x, mask)[:, 0],
        default_value=7.0,
    ),
    "TensorScatterUpdate of rows": lambda x, mask: tf.tensor_scatter_nd_update(
        x, _found(mask), tf.boolean_mask(2 * x, mask)
    ),
    "DynamicStitch": lambda x, ids: tf.dynamic_stitch(
        tf.dynamic_partition(_numbers(x), ids, 5),
        tf.dynamic_partition(x, ids, 5),
    ),
    "DynamicStitch of some parts": lambda x, ids: tf.dynamic_stitch(
        tf.dynamic_partition(_numbers(x), ids, 5)[:1],
        tf.dynamic_partition(x, ids, 5)[:1],
    ),
}


test_scatters = as_listed("indexing: scatters", SCATTERS)


SEGMENTS = {
    "UnsortedSegmentSum of columns": lambda x: tf.math.unsorted_segment_sum(
        tf.transpose(x), [0, 1, 0, 1], 2
    ),
    "UnsortedSegmentMin of columns": lambda x: tf.math.unsorted_segment_min(
        tf.transpose(x), [0, 1, 0, 1], 2
    ),
    "UnsortedSegmentSum to rows": lambda x, mask: tf.math.unsorted_segment_sum(
        tf.boolean_mask(x, mask), _found(mask)[:, 0], tf.shape(x, tf.int64)[0]
    ),
    "SegmentSum of all rows": lambda x: tf.math.segment_sum(x, _numbers(x)),
    "SegmentSum of some rows": lambda x, mask: tf.math.segment_sum(
        tf.boolean_mask(x, mask), _found(mask)[:, 0]
    ),
    "DenseBincount": lambda ids: tf.math.bincount(
        ids, minlength=5, maxlength=5
    ),
    "DenseBincount of a matrix": lambda pairs: raw_op(
        "DenseBincount", size=5, weights=[0.0] * 0
    )(pairs),
    "DenseBincount that is binary": lambda ids: raw_op(
        "DenseBincount", size=5, weights=[0.0] * 0, binary_output=True
    )(ids),
    "DenseBincount of a matrix that is binary": lambda pairs: raw_op(
        "DenseBincount", size=5, weights=[0.0] * 0, binary_output=True
    )(pairs),
}


test_segments = as_listed("indexing: segments", SEGMENTS)
