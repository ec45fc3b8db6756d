"""Ranks that are threads, for what sums over processes."""

import concurrent.futures
import threading
import types

import numpy as np
import tensorflow as tf

from keras_towers.reduction.rank_sum import RankSum
from keras_towers.transport import SingleProcess


class ThreadTransport:
    """A ``Transport`` to the other threads of a meeting, eagerly."""

    name = "threads"

    def __init__(self, meeting, rank, size, sums_float16):
        self.sums_float16 = sums_float16
        self._meeting, self.rank, self.local_rank = meeting, rank, rank
        self.size = self.local_size = size

    def gather_objects(self, value, key="objects"):
        meeting = self._meeting
        meeting.table[key, self.rank] = value
        if self.rank == 0:
            meeting.keys.append(key)
        meeting.barrier.wait()
        values = [meeting.table[key, r] for r in range(self.size)]
        meeting.barrier.wait()
        return values

    def all_reduce(self, tensors, key):
        rows = self.gather_objects(list(tensors), key)
        return [tf.add_n(list(column)) for column in zip(*rows, strict=True)]

    def reduce_scatter(self, tensor, counts, key):
        (total,) = self.all_reduce([tensor], key)
        return tf.split(total, counts)[self.rank]

    def all_gather(self, tensor, key, counts=None):
        return tf.concat(self.gather_objects(tensor, key), axis=0)

    def broadcast(self, tensors, key, root=0):
        return self.gather_objects(list(tensors), key)[root]

    def all_to_all(self, tensor, key):
        sent = self.gather_objects(tf.split(tensor, self.size), key)
        return tf.concat([parts[self.rank] for parts in sent], axis=0)


def on_ranks(size, function, sums_float16=True):
    """Call ``function(transport)`` on every rank; results and the keys used."""
    barrier = threading.Barrier(size, timeout=60)
    meeting = types.SimpleNamespace(barrier=barrier, table={}, keys=[])
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(
                function, ThreadTransport(meeting, rank, size, sums_float16)
            )
            for rank in range(size)
        ]
        return [future.result(timeout=60) for future in futures], meeting.keys


def summed(exchange, rows, **engine):
    """What the ranks get, each of which gives a row, and the keys used."""
    given = [[*map(tf.convert_to_tensor, row)] for row in rows]
    return on_ranks(
        len(rows), lambda t: exchange(t, given[t.rank], "k"), **engine
    )


class Owner:
    """In place of an optimizer."""


def alone(hook):
    """A function that exchanges one tensor on one process, in a graph."""
    rank_sum, owner = RankSum(SingleProcess(), hook), Owner()
    return tf.function(
        lambda x: rank_sum.sum(owner, [owner], [x])[0], autograph=False
    )


def random_rows(size, shapes, dtype=tf.float32, seed=0):
    """Tensors for each rank, of these shapes."""
    draw = np.random.default_rng(seed).normal
    return [[tf.cast(draw(size=s), dtype) for s in shapes] for _ in range(size)]
