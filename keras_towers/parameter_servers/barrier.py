"""How workers wait for one another, by way of a parameter server.

Workers that update the weights themselves visit a barrier twice in each step:

1. when a worker has read the weights. Nobody updates them before all workers
   have read them, so all compute with the same weights.
2. when a worker has updated them. Nobody reads them before all workers have
   updated them.

So an odd number of visits means that a worker computes, and 2 n visits that its
step n is complete. Each visit is counted on the server, where a worker that
died finds its place, and published: a note goes into the queue of every worker.
A worker waits by receiving notes until all others have come as far as it has
to be; what it has received is kept on the server, too, so that nothing crosses
the network until the wait is over.

The weights may be waited for in parts. A note then says of one part that it has
been updated, so that a worker can read it while others are still updated.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.replicas.resources import Queue, variable

# How often a worker has come that has left, or is not waited for.
LEFT: int = 1 << 62
# Parts of the weights, at most, of which workers tell apart from the whole.
PARTS: int = 32
_WHOLE = PARTS
_ALL = -1


class Notes:
    """Lets workers wait until others have published enough progress.

    A publisher puts a note into the queue of each worker: the part, who it is,
    and a number that only grows. What a worker has received stays on the
    server: nothing crosses the network until the wait is over. All methods are
    operations, part of a tf.function.
    """

    def __init__(
        self, name: str, device: str, rank: int, size: int, publishers: int
    ):
        """Create the notes of ``publishers`` workers for ``size`` workers."""
        self._device = device
        self.rank: int = rank
        self._publishers = publishers
        self._queues = [
            Queue(f"{name}/{r}", device, [tf.int64] * 3) for r in range(size)
        ]
        # The numbers received, by part and by publisher.
        self._known: Any = variable(
            f"{name}/known_{rank}", device, (PARTS + 1, publishers), tf.int64
        )

    def begin(self) -> None:
        """Start over; one worker does so, while nobody uses the notes."""
        for queue in self._queues:
            queue.clear()

    def reset(self, numbers: tf.Tensor) -> tf.Tensor:
        """Start waiting, given the present progress of the publishers."""
        with tf.device(self._device):
            known = tf.broadcast_to(numbers, (PARTS + 1, self._publishers))
            return tf.identity(self._known.assign(known))

    def publish(
        self, who: int, number: tf.Tensor, part: int = _WHOLE
    ) -> list[tf.Operation | None]:
        """Publish to all workers the progress of a part of the weights."""
        with tf.device(self._device):
            note = tf.constant([part, who], tf.int64)
            return [q.put(note[0], note[1], number) for q in self._queues]

    def release(self) -> None:
        """Let all workers continue."""
        with tf.device(self._device):
            for who in range(self._publishers):
                self.publish(who, tf.constant(LEFT, tf.int64), _ALL)

    def wait(self, number: tf.Tensor, part: int = _WHOLE) -> tf.Tensor:
        """Wait for the progress of all publishers in a part of the weights."""

        def is_early(known: tf.Tensor) -> tf.Tensor:
            with tf.device(self._device):
                return tf.reduce_min(known[part]) < number

        def receive(known: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(self._device):
                about, who, number = self._queues[self.rank].get()
                rows = tf.range(PARTS + 1, dtype=tf.int64)[:, tf.newaxis]
                noted = tf.one_hot(
                    who, self._publishers, number, dtype=tf.int64
                )
                concerned = (rows == about) | (about == _ALL)
                return [tf.where(concerned, tf.maximum(known, noted), known)]

        with tf.device(self._device):
            (known,) = tf.while_loop(
                is_early, receive, [self._known.read_value()]
            )
            return tf.identity(self._known.assign(known))


class Barrier(Notes):
    """Lets workers continue once all have arrived equally often.

    How often a worker has come stays on the server, for the case that it dies
    and returns.
    """

    def __init__(self, name: str, device: str, rank: int, size: int):
        super().__init__(name, device, rank, size, size)
        self._visits = [
            variable(f"{name}/visits_{r}", device, (), tf.int64)
            for r in range(size)
        ]

    def begin(self) -> None:
        super().begin()
        with tf.device(self._device):
            for counter in self._visits:
                counter.assign(tf.zeros((), tf.int64), read_value=False)

    def enter(self) -> tf.Tensor:
        """Return how often this worker has arrived, also before it died."""
        with tf.device(self._device):
            visits = [counter.read_value() for counter in self._visits]
            with tf.control_dependencies([self.reset(tf.stack(visits))]):
                return tf.identity(visits[self.rank])

    def visits(self) -> tf.Tensor:
        """Return how often this worker has arrived so far."""
        with tf.device(self._device):
            return self._visits[self.rank].read_value()

    def _end_of_step(self) -> tf.Tensor:
        """Return the number of visits at which the current step is complete.

        All of it on the server: what goes to a worker and back waits there
        behind gradients and weights.
        """
        with tf.device(self._device):
            return (self.visits() + 1) // 2 * 2

    def publish_part(self, part: int) -> None:
        """Publish that this worker has updated a part of the weights."""
        self.publish(self.rank, self._end_of_step(), part)

    def wait_for_end_of_step(self, part: int = _WHOLE) -> tf.Tensor:
        """Wait until all have updated the weights, or a part of them."""
        return self.wait(self._end_of_step(), part)

    def wait_for_all(self) -> tf.Tensor:
        """Wait until all have arrived as often as this worker."""
        return self.wait(self.visits())

    def arrive(self) -> list[Any]:
        """Arrive once more, without waiting."""
        with tf.device(self._device):
            one = tf.ones((), tf.int64)
            visits = tf.identity(self._visits[self.rank].assign_add(one))
            return [visits, *self.publish(self.rank, visits)]

    def leave(self) -> None:
        """Let the others continue without this worker."""
        with tf.device(self._device):
            counter = self._visits[self.rank]
            left = tf.identity(counter.assign(tf.constant(LEFT, tf.int64)))
            self.publish(self.rank, left, _ALL)
