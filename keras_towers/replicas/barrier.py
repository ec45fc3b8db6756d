"""A barrier of workers, on a parameter server."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.replicas.resources import Queue, variable

_HOST = "/device:CPU:0"
# How often a worker has come that has left, or is not waited for.
LEFT: int = 1 << 62


class Barrier:
    """Lets workers go on when all have come as often as each of them."""

    # How often a worker has come stays on the server, for the case that it dies
    # and returns. A worker that comes also puts a note into the queue of each
    # other one, which waits for such notes. All methods are operations, part of
    # a tf.function.

    def __init__(self, name: str, device: str, rank: int, size: int):
        self._device = device
        self._rank = rank
        self._size = size
        self._came = [
            variable(f"{name}/came_{r}", device, (), tf.int64)
            for r in range(size)
        ]
        self._queues = [
            Queue(f"{name}/{r}", device, [tf.int64, tf.int64])
            for r in range(size)
        ]
        # What this worker knows of all.
        self._known: Any = compat.hidden_variable(
            _HOST, tf.zeros([size], tf.int64)
        )

    def begin(self) -> None:
        """Begin anew; one worker does it, while nobody uses it."""
        for queue in self._queues:
            queue.clear()
        with tf.device(self._device):
            for came in self._came:
                came.assign(tf.zeros((), tf.int64), read_value=False)

    def enter(self) -> tf.Tensor:
        """Return how often this worker has come, maybe before it died."""
        with tf.device(self._device):
            came = [each.read_value() for each in self._came]
        mine = came[self._rank]
        came[self._rank] = tf.constant(LEFT, tf.int64)
        with tf.control_dependencies([self._known.assign(tf.stack(came))]):
            return tf.identity(mine)

    def arrive(self) -> list[Any]:
        """Come once more, without waiting."""
        with tf.device(self._device):
            came = self._came[self._rank]
            return self._tell(came.assign_add(tf.ones((), tf.int64)))

    def leave(self) -> None:
        """Let the others go on without this worker."""
        with tf.device(self._device):
            left = self._came[self._rank].assign(tf.constant(LEFT, tf.int64))
            self._tell(left)

    def _tell(self, came: Any) -> list[Any]:
        told = tf.identity(came)
        me = tf.constant(self._rank, tf.int64)
        others = [q for r, q in enumerate(self._queues) if r != self._rank]
        return [told, *(queue.put(me, told) for queue in others)]

    def wait(self) -> tf.Tensor:
        """Wait until all have come as often as this worker."""

        def take(known: tf.Tensor) -> list[tf.Tensor]:
            rank, told = self._queues[self._rank].get()
            at = tf.one_hot(rank, self._size, on_value=told, dtype=tf.int64)
            return [tf.maximum(known, at)]

        with tf.device(self._device):
            mine = self._came[self._rank].read_value()
        (known,) = tf.while_loop(
            lambda known: tf.reduce_min(known) < mine,
            take,
            [self._known.read_value()],
        )
        return tf.identity(self._known.assign(known))
