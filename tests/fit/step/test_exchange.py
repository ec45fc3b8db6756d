"""Exchanges between towers of several ranks, which are threads here."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.tower_program import exchange_tensors
from keras_towers.partition.program import Exchange, Tensor
from tests.reduction.ranks import on_ranks


def exchange(kind, dtype, rank, axis=0):
    tensors = [
        Tensor(
            tf.as_dtype(dtype), tf.TensorShape([None] * rank), on_towers=True
        )
        for _ in range(2)
    ]
    return Exchange(kind, *tensors, axis)


KINDS = [
    exchange("sum", "float32", 1),
    exchange("gather", "float32", 2),
    exchange("gather", "int32", 2, axis=1),
    exchange("sum", "float32", 2),
    exchange("before", "int64", 0),
    exchange("first", "float32", 0),
]


def of_tower(k):
    """The tensors of tower k, which has k rows."""
    return [
        tf.constant([1.0, k]),
        tf.fill([k, 2], float(k)),
        tf.fill([2, k], k),
        tf.eye(2) * k,
        tf.constant(k, tf.int64),
        tf.constant(5.0),
    ]


@pytest.mark.parametrize("towers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exchanges(towers, ranks):
    total = towers * ranks

    def run(transport):
        first = transport.rank * towers
        own = [of_tower(k) for k in range(first, first + towers)]
        every = [list(column) for column in zip(*own, strict=True)]
        return exchange_tensors(KINDS, every, transport)

    results, _ = on_ranks(ranks, run)
    numbers = np.arange(total)
    rows = np.repeat(numbers, numbers)
    for rank, found in enumerate(results):
        pair, gathered, columns, matrix, before, first = found
        np.testing.assert_array_equal(pair, [total, numbers.sum()])
        np.testing.assert_array_equal(gathered, np.stack([rows, rows], 1))
        np.testing.assert_array_equal(columns, np.stack([rows, rows]))
        np.testing.assert_array_equal(matrix, np.eye(2) * numbers.sum())
        wanted = [
            sum(range(k)) for k in range(rank * towers, (rank + 1) * towers)
        ]
        assert [int(b) for b in before] == wanted
        assert float(first) == 5
