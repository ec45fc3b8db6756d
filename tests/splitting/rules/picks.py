"""Picking rows by their indices, and adding up rows by their indices."""

from __future__ import annotations

import tensorflow as tf

from tests.splitting.rules.case import Case, floats, ints, raw

_FROM_OTHERS = "rows of other examples"


def _places(axes: str, high: int, **options):
    return ints(axes, high=high, scales=False, kinds="same", **options)


def _gather(
    values: str, places: str, axis: int, batch: int, splits: str
) -> Case:
    high = {"a": 1, "b": 2, "c": 3, "d": 1, "e": 4}[values[axis]]
    return Case(
        "GatherV2",
        lambda x, i: tf.gather(x, i, axis=axis, batch_dims=batch),
        [*floats(values), *_places(places, high)],
        splits,
        {} if values[axis] in splits else {values[axis]: _FROM_OTHERS},
        letters="".join(set(values + places) - {values[axis]}),
        note=f"{values},{places},{axis},{batch}",
    )


_ADDING = (
    ("Add", tf.tensor_scatter_nd_add),
    ("Sub", tf.tensor_scatter_nd_sub),
)
_WRITING = (
    ("Update", tf.tensor_scatter_nd_update),
    ("Max", tf.tensor_scatter_nd_max),
    ("Min", tf.tensor_scatter_nd_min),
)
CASES = [
    _gather("bc", "ae", 0, 0, "aec"),
    _gather("cb", "ae", 1, 0, "aec"),
    _gather("ab", "ac", 1, 1, "ac"),
    _gather("abe", "ac", 1, 1, "ace"),
    _gather("ab", "a", 1, 1, "a"),
    _gather("dab", "dac", 2, 2, "dac"),
    _gather("abe", "", 1, 0, "ae"),
    Case(
        "Gather",
        raw("Gather", "params indices"),
        [*floats("bc"), *_places("ae", 2)],
        "ace",
        {"b": _FROM_OTHERS},
        letters="ace",
    ),
    Case(
        "GatherNd",
        tf.gather_nd,
        [*floats("ddc"), *_places("ead", 1)],
        "ea",
        letters="ea",
    ),
    Case(
        "GatherNd",
        tf.gather_nd,
        [*floats("ddd"), *_places("ed", 1)],
        "e",
        letters="e",
        note="one",
    ),
    Case(
        "UnsortedSegmentSum",
        lambda x, i: tf.math.unsorted_segment_sum(x, i, 4),
        [*floats("abc"), *_places("a", 3)],
        "abc",
    ),
    Case(
        "UnsortedSegmentSum",
        lambda x, i: tf.math.unsorted_segment_sum(x, i, 4),
        [*floats("abc"), *_places("ab", 3)],
        "abc",
        note="two",
    ),
    Case(
        "UnsortedSegmentSum",
        lambda x, i: tf.math.unsorted_segment_sum(x, i, tf.shape(x)[0]),
        [*floats("ec"), *_places("e", 1)],
        "c",
        {"e": "a segment for every example"},
        note="each",
    ),
    Case(
        "SegmentSum",
        lambda x: tf.math.segment_sum(x, [0, 0, 1]),
        floats("bc"),
        letters="c",
    ),
    Case(
        "SegmentSum",
        lambda x, i: tf.math.segment_sum(x, tf.sort(i)),
        [*floats("ac"), *_places("a", 2)],
        letters="c",
        note="sorted",
    ),
    Case(
        "ScatterNd",
        lambda i, x: tf.scatter_nd(i[:, None], x, [4, 3]),
        [*_places("a", 3), *floats("ab")],
        "a",
    ),
    *(
        Case(
            f"TensorScatter{name}",
            lambda t, i, x, f=function: f(t, i[:, None], x),
            [*floats("cb"), *_places("a", 3), *floats("ab")],
            letters="a",
        )
        for name, function in _ADDING
    ),
    *(
        Case(
            f"TensorScatter{name}",
            lambda t, x, f=function: f(t, [[1], [1]], x),
            floats("cb", "ab"),
            "b",
            letters="b",
            note="in place",
        )
        for name, function in _ADDING
    ),
    *(
        Case(
            f"TensorScatter{name}",
            lambda t, x, f=function: f(t, [[0], [2]], x),
            floats("cb", "ab"),
            "b",
            letters="ab",
        )
        for name, function in _WRITING
    ),
    *(
        Case(
            f"TensorScatter{name}",
            lambda t, x, f=function: f(t, [[0, 1], [2, 0]], x),
            floats("cdeb", "aeb"),
            "eb",
            {"c": "of other examples"},
            letters="eb",
            note="two",
        )
        for name, function in _WRITING
    ),
    Case(
        "Bincount",
        lambda i, w: tf.raw_ops.Bincount(arr=i, size=4, weights=w),
        [*_places("a", 3), *floats("a")],
        "a",
    ),
    Case(
        "DenseBincount",
        lambda i: tf.math.bincount(i, minlength=4, maxlength=4),
        _places("a", 3),
        note="counts",
    ),
    *(
        Case(
            "DenseBincount",
            lambda i, w, b=binary: tf.raw_ops.DenseBincount(
                input=i, size=4, weights=w, binary_output=b
            ),
            [*_places(axes, 3), *floats(axes)],
            "" if binary and axes == "a" else "a",
            note=f"{axes}{binary}",
        )
        for axes in ("a", "ab")
        for binary in (False, True)
    ),
    Case(
        "DenseBincount",
        lambda i: tf.raw_ops.DenseBincount(
            input=i, size=4, weights=tf.zeros([0]), binary_output=False
        ),
        _places("ab", 3),
        "a",
        note="no weights",
    ),
]
