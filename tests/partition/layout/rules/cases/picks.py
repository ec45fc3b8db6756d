"""Picking rows by their indices, and adding up rows by their indices."""

import tensorflow as tf

from tests.partition.layout.rules.cases.case import SIZES, axis_size, cases_of


def _gather(values, places, axis, batch):
    def apply(x, i):
        return tf.gather(x, i, axis=axis, batch_dims=batch)

    return cases_of(
        f"{values}, {places or '-'}:whole",
        **{f"GatherV2_{values},{places},{axis},{batch}": apply},
        high=SIZES[values[axis]] - 1,
    )


_ADDING = "TensorScatterAdd TensorScatterSub"
_WRITING = "TensorScatterUpdate TensorScatterMax TensorScatterMin"
_COUNTED = {"size": 4, "binary_output": False}
_ASKED = {"size": 4, "binary_output": True}
CASES = [
    *_gather("bc", "ae", 0, 0),
    *_gather("cb", "ae", 1, 0),
    *_gather("ab", "ac", 1, 1),
    *_gather("abe", "ac", 1, 1),
    *_gather("ab", "a", 1, 1),
    *_gather("dab", "dac", 2, 2),
    *_gather("abe", "", 1, 0),
    *cases_of("bc, ae:whole", "Gather", high=2),
    *cases_of("ddc, ead:whole", "GatherNd", high=1),
    *cases_of("ddd, ed:whole", GatherNd_one={}, high=1),
    *cases_of("abc, a:whole", "UnsortedSegmentSum", {"num_segments": 4}),
    *cases_of("abc, ab:whole", "UnsortedSegmentSum", {"num_segments": 4}),
    *cases_of(
        "ec, e:whole",
        UnsortedSegmentSum_each={"num_segments": lambda x, i: axis_size(x)},
        high=1,
    ),
    *cases_of("bc", "SegmentSum", {"segment_ids": [0, 0, 1]}),
    *cases_of(
        "ac, a:whole",
        SegmentSum_sorted=lambda x, i: tf.math.segment_sum(x, tf.sort(i)),
        high=2,
    ),
    *cases_of(
        "a:whole, ab",
        ScatterNd=lambda i, x: tf.scatter_nd(i[:, None], x, [4, 3]),
    ),
    *cases_of(
        "a:whole, a:bool",
        ScatterNd_bool=lambda i, x: tf.scatter_nd(i[:, None], x, [4]),
    ),
    *cases_of(
        "cb, a:whole, ab",
        TensorScatterAdd=lambda t, i, x: tf.tensor_scatter_nd_add(
            t, i[:, None], x
        ),
        TensorScatterSub=lambda t, i, x: tf.tensor_scatter_nd_sub(
            t, i[:, None], x
        ),
    ),
    *cases_of("cb, ab", _ADDING, {"indices": [[1], [1]]}),
    *cases_of("cb, ab", _WRITING, {"indices": [[0], [2]]}),
    *cases_of("cdeb, aeb", _WRITING, {"indices": [[0, 1], [2, 0]]}),
    *cases_of("a:whole, a", "Bincount", {"size": 4}),
    *cases_of(
        "a:whole",
        DenseBincount_counts=lambda i: tf.math.bincount(
            i, minlength=4, maxlength=4
        ),
    ),
    *cases_of("a:whole, a", "DenseBincount", _COUNTED),
    *cases_of("a:whole, a", "DenseBincount", _ASKED),
    *cases_of("ab:whole, ab", "DenseBincount", _COUNTED),
    *cases_of("ab:whole, ab", "DenseBincount", _ASKED),
    *cases_of(
        "ab:whole",
        "DenseBincount",
        {"weights": lambda i: tf.zeros([0]), **_COUNTED},
    ),
]
