"""Picking rows by their indices, and adding up rows by their indices."""

import tensorflow as tf

from tests.splitting.layouts import SIZES
from tests.splitting.rules.case import cases, size

_FROM_OTHERS = "rows of other examples"


def _gather(values, places, axis, batch, splits):
    def apply(x, i):
        return tf.gather(x, i, axis=axis, batch_dims=batch)

    picked = values[axis]
    others = "".join(sorted(set(values + places) - {picked}))
    return cases(
        f"{values}, {places or '-'}:place -> {splits} only {others}",
        {f"GatherV2-{values},{places},{axis},{batch}": apply},
        refuses={} if picked in splits else {picked: _FROM_OTHERS},
        high=SIZES[picked] - 1,
    )


_ADDING = "TensorScatterAdd TensorScatterSub"
_WRITING = "TensorScatterUpdate TensorScatterMax TensorScatterMin"
_COUNTED = {"size": 4, "binary_output": False}
_ASKED = {"size": 4, "binary_output": True}
CASES = [
    *_gather("bc", "ae", 0, 0, "aec"),
    *_gather("cb", "ae", 1, 0, "aec"),
    *_gather("ab", "ac", 1, 1, "ac"),
    *_gather("abe", "ac", 1, 1, "ace"),
    *_gather("ab", "a", 1, 1, "a"),
    *_gather("dab", "dac", 2, 2, "dac"),
    *_gather("abe", "", 1, 0, "ae"),
    *cases(
        "bc, ae:place -> ace only",
        "Gather",
        refuses={"b": _FROM_OTHERS},
        high=2,
    ),
    *cases("ddc, ead:place -> ea only", "GatherNd", high=1),
    *cases("ddd, ed:place -> e only", {"GatherNd-one": {}}, high=1),
    *cases("abc, a:place -> abc", "UnsortedSegmentSum", {"num_segments": 4}),
    *cases("abc, ab:place -> abc", "UnsortedSegmentSum", {"num_segments": 4}),
    *cases(
        "ec, e:place -> c",
        {"UnsortedSegmentSum-each": {"num_segments": lambda x, i: size(x)}},
        refuses={"e": "a segment for every example"},
        high=1,
    ),
    *cases("bc -> - only c", "SegmentSum", {"segment_ids": [0, 0, 1]}),
    *cases(
        "ac, a:place -> - only c",
        {"SegmentSum-sorted": lambda x, i: tf.math.segment_sum(x, tf.sort(i))},
        high=2,
    ),
    *cases(
        "a:place, ab -> a",
        {"ScatterNd": lambda i, x: tf.scatter_nd(i[:, None], x, [4, 3])},
    ),
    *cases(
        "cb, a:place, ab -> - only a",
        {
            "TensorScatterAdd": lambda t, i, x: tf.tensor_scatter_nd_add(
                t, i[:, None], x
            ),
            "TensorScatterSub": lambda t, i, x: tf.tensor_scatter_nd_sub(
                t, i[:, None], x
            ),
        },
    ),
    *cases("cb, ab -> b only", _ADDING, {"indices": [[1], [1]]}),
    *cases("cb, ab -> b only ab", _WRITING, {"indices": [[0], [2]]}),
    *cases(
        "cdeb, aeb -> eb only",
        _WRITING,
        {"indices": [[0, 1], [2, 0]]},
        refuses={"c": "of other examples"},
    ),
    *cases("a:place, a -> a", "Bincount", {"size": 4}),
    *cases(
        "a:place -> -",
        {
            "DenseBincount-counts": lambda i: tf.math.bincount(
                i, minlength=4, maxlength=4
            )
        },
    ),
    *cases("a:place, a -> a", "DenseBincount", _COUNTED),
    *cases("a:place, a -> -", "DenseBincount", _ASKED),
    *cases("ab:place, ab -> a", "DenseBincount", _COUNTED),
    *cases("ab:place, ab -> a", "DenseBincount", _ASKED),
    *cases(
        "ab:place -> a",
        "DenseBincount",
        {"weights": lambda i: tf.zeros([0]), **_COUNTED},
    ),
]
