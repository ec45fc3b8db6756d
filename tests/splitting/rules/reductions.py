"""Operations over whole axes."""

import tensorflow as tf

from tests.splitting.rules.case import cases

_WORDS = {
    "Max": "takes the largest value of the batch",
    "Min": "takes the smallest value of the batch",
    "Prod": "multiplies the examples of the batch",
    "EuclideanNorm": "takes a norm over the batch",
    "All": "whether all examples",
    "Any": "whether any example",
}
_BATCH = "over the examples of the batch"


def _over(names, axes, entries="", keep=False):
    kept = {0, 1, 2} - {axis % 3 for axis in axes}
    left = "".join("abc"[axis] for axis in sorted(kept))
    gone = set("abc") - set(left)
    found = []
    for name in names.split():
        linear = name == "Sum" or (name == "Mean" and entries != "whole")
        words = dict.fromkeys(gone, _WORDS[name]) if name in _WORDS else {}
        found += cases(
            f"abc:{entries} -> {'abc' if linear else left}",
            {f"{name}-{axes}{keep}": {"axis": axes, "keep_dims": keep}},
            refuses=words,
        )
    return found


_EVERY = "Sum Mean Max Min Prod EuclideanNorm"
CASES = [
    *(*_over(_EVERY, [0]), *_over(_EVERY, [0, -1]), *_over(_EVERY, [2, 0])),
    *_over("Sum Mean Max", [0, -1], keep=True),
    *(*_over("All Any", [0], "bool"), *_over("All Any", [0, -1], "bool")),
    *_over("Sum Mean Max", [0, 2], "whole"),
    *_over("Sum", []),
    *cases("- -> - only -", {"Sum-0": {"axis": []}}),
    *cases(
        "abc -> ac",
        "ArgMax ArgMin",
        {"dimension": 1},
        refuses={"b": "which example"},
    ),
    *cases("abc -> ab", "BiasAddGrad"),
    *cases("abc -> ac", {"BiasAddGrad-first": {"data_format": "NCHW"}}),
    *cases("ab -> ab", "L2Loss"),
    *cases(
        "abc -> ac",
        "Cumsum Cumprod CumulativeLogsumexp",
        {"axis": 1},
        refuses={"b": "accumulates"},
    ),
    *cases("abc -> ab", "Softmax LogSoftmax", refuses={"c": _BATCH}),
    *cases("abc -> ab", "TopKV2", {"k": 2}, refuses={"c": _BATCH}),
    *cases("ab -> a", "NthElement", {"n": 1}),
    *cases("ab, ab -> a", "SoftmaxCrossEntropyWithLogits"),
    *cases("ab, 1b -> - only a", {"SoftmaxCrossEntropyWithLogits-1b": {}}),
    *cases("ab, a:count -> a", "SparseSoftmaxCrossEntropyWithLogits", high=2),
    *cases("ab, a:count -> a", "InTopKV2 InTopK", {"k": 2}, high=2),
    *cases(
        "ab -> ab",
        "HistogramFixedWidth",
        {"value_range": [-1.0, 1.0], "nbins": 5},
    ),
    *cases(
        "b -> - only -",
        {
            "InvertPermutation": {
                "x": lambda x: tf.cast(tf.argsort(x), tf.int32)
            }
        },
    ),
]
