"""Operations over whole axes."""

import tensorflow as tf

from tests.partition.layout.rules.cases.case import cases_of


def _over(names, axes, entries="", keep=False):
    given = {"axis": axes, "keep_dims": keep}
    named = {f"{name}_{axes}{keep}": given for name in names.split()}
    return cases_of(f"abc:{entries}", **named)


_EVERY = "Sum Mean Max Min Prod EuclideanNorm"
CASES = [
    *(*_over(_EVERY, [0]), *_over(_EVERY, [0, -1]), *_over(_EVERY, [2, 0])),
    *_over("Sum Mean Max", [0, -1], keep=True),
    *(*_over("All Any", [0], "bool"), *_over("All Any", [0, -1], "bool")),
    *_over("Sum Mean Max", [0, 2], "whole"),
    *_over("Sum", []),
    *cases_of("-", Sum_0={"axis": []}),
    *cases_of("abc", "ArgMax ArgMin", {"dimension": 1}),
    *cases_of("abc", "BiasAddGrad"),
    *cases_of("abc", BiasAddGrad_first={"data_format": "NCHW"}),
    *cases_of("ab", "L2Loss"),
    *cases_of("abc", "Cumsum Cumprod CumulativeLogsumexp", {"axis": 1}),
    *cases_of("abc", "Softmax LogSoftmax"),
    *cases_of("abc", "TopKV2", {"k": 2}),
    *cases_of("ab", "NthElement", {"n": 1}),
    *cases_of("ab, ab", "SoftmaxCrossEntropyWithLogits"),
    *cases_of("ab, a:whole", "SparseSoftmaxCrossEntropyWithLogits", high=2),
    *cases_of("ab, a:whole", "InTopKV2 InTopK", {"k": 2}, high=2),
    *cases_of(
        "ab", "HistogramFixedWidth", {"value_range": [-1.0, 1.0], "nbins": 5}
    ),
    *cases_of(
        "b", InvertPermutation={"x": lambda x: tf.cast(tf.argsort(x), tf.int32)}
    ),
]
