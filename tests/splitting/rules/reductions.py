"""Operations over whole axes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.splitting.layouts import Arg
from tests.splitting.rules.case import Case, floats, ints, raw

_WORDS = {
    "Max": "takes the largest value of the batch",
    "Min": "takes the smallest value of the batch",
    "Prod": "multiplies the examples of the batch",
    "EuclideanNorm": "takes a norm over the batch",
    "All": "whether all examples",
    "Any": "whether any example",
}


def _over(name: str, axes: Any, keep: bool = False, args: Any = None) -> Case:
    kept = "abc" if axes == [] else "bc" if axes == [0] else "b"
    words = _WORDS.get(name)
    gone = "" if words is None else "".join(a for a in "abc" if a not in kept)
    args = args or floats("abc")
    return Case(
        name,
        lambda x: getattr(tf.raw_ops, name)(input=x, axis=axes, keep_dims=keep),
        args,
        kept if words or args[0].dtype == "int32" and name == "Mean" else "abc",
        dict.fromkeys(gone, words),
        note=f"{axes}{keep}{args[0].dtype}",
    )


_NAMES = ["Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"]
_AXES: list[Any] = [[0], [0, -1], [2, 0]]
_WAYS = [_over(name, axes) for name in _NAMES for axes in _AXES]
_KEPT = [_over(name, [0, -1], True) for name in ("Sum", "Mean", "Max")]
_TRUTHS = [
    _over(name, axes, args=[Arg("abc", "bool")])
    for name in ("All", "Any")
    for axes in _AXES[:2]
]
_WHOLE = [_over(n, [0, 2], args=ints("abc")) for n in ("Sum", "Mean", "Max")]
_BATCH = "over the examples of the batch"


def _along(function: Any, axis: int) -> Any:
    return lambda x: function(x, axis)


CASES = [
    *_WAYS,
    *_KEPT,
    *_TRUTHS,
    *_WHOLE,
    _over("Sum", []),
    Case("Sum", lambda x: tf.reduce_sum(x), floats(""), letters="", note="0"),
    *(
        Case(
            name,
            _along(function, 1),
            floats("abc"),
            "ac",
            {"b": "which example"},
        )
        for name, function in (("ArgMax", tf.argmax), ("ArgMin", tf.argmin))
    ),
    Case(
        "BiasAddGrad", raw("BiasAddGrad", "out_backprop"), floats("abc"), "ab"
    ),
    Case(
        "BiasAddGrad",
        raw("BiasAddGrad", "out_backprop", data_format="NCHW"),
        floats("abc"),
        "ac",
        note="first",
    ),
    Case("L2Loss", tf.nn.l2_loss, floats("ab"), "ab"),
    *(
        Case(
            name, _along(function, 1), floats("abc"), "ac", {"b": "accumulates"}
        )
        for name, function in (
            ("Cumsum", tf.cumsum),
            ("Cumprod", tf.math.cumprod),
            ("CumulativeLogsumexp", tf.math.cumulative_logsumexp),
        )
    ),
    Case("Softmax", tf.nn.softmax, floats("abc"), "ab", {"c": _BATCH}),
    Case("LogSoftmax", tf.nn.log_softmax, floats("abc"), "ab", {"c": _BATCH}),
    Case(
        "TopKV2",
        lambda x: tf.math.top_k(x, 2),
        floats("abc"),
        "ab",
        {"c": _BATCH},
    ),
    Case(
        "NthElement",
        lambda x: tf.raw_ops.NthElement(input=x, n=1),
        floats("ab"),
        "a",
    ),
    *(
        Case(
            "SoftmaxCrossEntropyWithLogits",
            raw("SoftmaxCrossEntropyWithLogits", "features labels"),
            floats(*axes),
            "" if "1" in axes[1] else "a",
            letters="a" if "1" in axes[1] else None,
            note=axes[1],
        )
        for axes in (("ab", "ab"), ("ab", "1b"))
    ),
    Case(
        "SparseSoftmaxCrossEntropyWithLogits",
        raw("SparseSoftmaxCrossEntropyWithLogits", "features labels"),
        [*floats("ab"), *ints("a", high=2, scales=False)],
        "a",
    ),
    Case(
        "InTopKV2",
        lambda x, y: tf.math.in_top_k(y, x, 2),
        [*floats("ab"), *ints("a", high=2, scales=False)],
        "a",
    ),
    Case(
        "InTopK",
        lambda x, y: tf.raw_ops.InTopK(predictions=x, targets=y, k=2),
        [*floats("ab"), *ints("a", high=2, scales=False)],
        "a",
    ),
    Case(
        "HistogramFixedWidth",
        lambda x: tf.histogram_fixed_width(x, [-1.0, 1.0], 5),
        floats("ab"),
        "ab",
    ),
    Case(
        "InvertPermutation",
        lambda x: tf.math.invert_permutation(tf.cast(tf.argsort(x), tf.int32)),
        floats("b"),
        "",
        letters="",
    ),
]
