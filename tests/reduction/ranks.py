"""Ranks that are threads, for what sums over processes."""

import concurrent.futures
import threading

import numpy as np
import tensorflow as tf


class Meeting:
    """Where the ranks' tensors of one job are put together, eagerly."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.table = {}
        self.keys = []


class ThreadTransport:
    """A ``Transport`` to the other threads of a meeting."""

    name = "threads"

    def __init__(self, meeting, rank, sums_float16=True):
        self.sums_float16 = sums_float16
        self._meeting, self.rank = meeting, rank
        self.size = self.local_size = meeting.size
        self.local_rank = rank

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

    def all_gather(self, tensor, key):
        return tf.concat(self.gather_objects(tensor, key), axis=0)

    def all_to_all(self, tensor, key):
        sent = self.gather_objects(tf.split(tensor, self.size), key)
        return tf.concat([parts[self.rank] for parts in sent], axis=0)


def on_ranks(size, function, **engine):
    """Call ``function(transport)`` on every rank; results and the keys used."""
    meeting = Meeting(size)
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(function, ThreadTransport(meeting, rank, **engine))
            for rank in range(size)
        ]
        return [future.result(timeout=60) for future in futures], meeting.keys


def random_tensors(rank, shapes, dtype=tf.float32):
    generator = np.random.default_rng(rank)
    return [tf.cast(generator.normal(size=s), dtype) for s in shapes]


def assert_sums(results, inputs, tolerance):
    """Every rank has the sums of all inputs, to the last bit alike."""
    for result in results:
        for index, total in enumerate(result):
            wanted = sum(row[index].numpy() for row in inputs)
            assert total.dtype == inputs[0][index].dtype
            assert total.shape == wanted.shape
            first = results[0][index].numpy()
            assert total.numpy().tobytes() == first.tobytes()
            scale = max(1, np.abs(wanted).max(initial=0))
            np.testing.assert_allclose(total, wanted, atol=tolerance * scale)
