"""A barrier of workers, on a parameter server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.replicas.resources import Queue

_HOST = "/device:CPU:0"
# The phase of a worker that has left: none comes behind it.
_LEFT = 1 << 62


class Barrier:
    """Lets workers go on when all have come.

    Every worker has a queue. One that comes puts a note into the queue of each:
    who it is, and how many times it has come. A worker goes on when it knows of
    all others that they have come as many times as itself. One that leaves for
    good has come for all times.

    Args:
        name: the same in all workers.
        device: where the queues are.
        rank: this worker.
        size: the number of workers.
    """

    def __init__(self, name: str, device: str, rank: int, size: int):
        self._rank = rank
        self._size = size
        self._queues = [
            Queue(f"{name}/{r}", device, [tf.int64, tf.int64])
            for r in range(size)
        ]
        with tf.init_scope(), compat.single_device_mode(), tf.device(_HOST):
            # How many times this worker has come, and what it knows of all.
            self._phase: Any = tf.Variable(0, dtype=tf.int64, trainable=False)  # pyright: ignore[reportArgumentType]
            self._known: Any = tf.Variable(
                tf.zeros([size], tf.int64), trainable=False
            )

    def clear(self) -> None:
        """Drop all notes, while nobody uses them."""
        for queue in self._queues:
            queue.clear()

    def begin(self) -> None:
        """Begin to count anew, as all workers do at the same time."""
        self._phase.assign(tf.zeros((), tf.int64))
        self._known.assign(tf.zeros([self._size], tf.int64))

    def wait(self) -> tf.Tensor:
        """Wait until all have come.

        Returns:
            What is ready when they have.
        """
        phase = self._phase.read_value() + 1
        put = self._tell(phase)
        with tf.control_dependencies(put):
            known = self._known.read_value()
        known = self._take_until(phase, known)
        with tf.control_dependencies(
            [self._known.assign(known), self._phase.assign(phase)]
        ):
            return tf.identity(phase)

    def find(self, left: Collection[int]) -> tf.Tensor:
        """Find out for what the others wait, as a worker that comes back.

        Args:
            left: the others that have left, as far as it is known; the notes
                that told so may have been taken.

        Returns:
            How many times they have come; this worker counts as having come
            once less.
        """
        silent = {self._rank, *left}
        known = tf.constant(
            [_LEFT if r in silent else 0 for r in range(self._size)], tf.int64
        )
        known = self._take_until(tf.ones((), tf.int64), known)
        here = tf.where(known < _LEFT, known, 0)
        phase = tf.maximum(tf.reduce_max(here), 1)
        known = tf.tensor_scatter_nd_update(
            known, [[self._rank]], [tf.zeros((), tf.int64)]
        )
        with tf.control_dependencies(
            [self._known.assign(known), self._phase.assign(phase - 1)]
        ):
            return tf.identity(phase)

    def _take_until(self, phase: tf.Tensor, known: tf.Tensor) -> tf.Tensor:
        def take(known: tf.Tensor) -> list[tf.Tensor]:
            rank, told = self._queues[self._rank].get()
            at = tf.one_hot(rank, self._size, on_value=told, dtype=tf.int64)
            return [tf.maximum(known, at)]

        (known,) = tf.while_loop(
            lambda known: tf.reduce_min(known) < phase, take, [known]
        )
        return known

    def leave(self) -> None:
        """Let the others go on without this worker."""
        self._tell(tf.constant(_LEFT, tf.int64))

    def _tell(self, phase: tf.Tensor) -> list[Any]:
        me = tf.constant(self._rank, tf.int64)
        return [queue.put(me, phase) for queue in self._queues]
