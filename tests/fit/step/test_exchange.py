"""What towers of several processes exchange, with threads for processes."""

import concurrent.futures
import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.tower_program import exchanged
from keras_towers.partition.program import Exchange, Tensor
from keras_towers.transport import SingleProcess


class Meeting:
    """Where threads give each other what they have."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=60)
        self._given = [None] * size

    def all_of(self, rank, value):
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class Rank(SingleProcess):
    """A process, played by a thread."""

    def __init__(self, rank, size, meeting):
        self.rank, self.size, self._meeting = rank, size, meeting

    def all_reduce(self, tensors, key):
        every = self._meeting.all_of(self.rank, list(tensors))
        return [tf.add_n(column) for column in zip(*every, strict=True)]

    def all_gather(self, tensor, key):
        return tf.concat(self._meeting.all_of(self.rank, tensor), 0)

    def broadcast(self, tensors, key, root=0):
        return self._meeting.all_of(self.rank, list(tensors))[root]


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
    """What a tower gives: of the rows, as many as its number."""
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
    meeting, total = Meeting(ranks), towers * ranks

    def run(rank):
        first = rank * towers
        own = [of_tower(k) for k in range(first, first + towers)]
        every = [list(column) for column in zip(*own, strict=True)]
        return exchanged(KINDS, every, Rank(rank, ranks, meeting))

    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
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
