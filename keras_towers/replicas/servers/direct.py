"""Workers that apply their own gradients to the weights on the servers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers.store import value_of
from keras_towers.replicas.asynchronous.update import (
    atomic,
    takes_turns,
)
from keras_towers.replicas.resources import (
    Functions,
    Queue,
    after_writes,
    done,
    variable,
)
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.workers import FitEnded

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


logger = logging.getLogger("keras_towers")


class DirectSession(Session):
    """A model whose workers update the weights on the servers themselves."""

    # All workers come to a barrier when they have read the weights, and when
    # they have updated them. Where nobody waits for others, each has a barrier
    # of its own, which knows where a worker that comes back was.

    def __init__(self, sync: bool, **given: Any):
        super().__init__(**given)
        self.in_step = sync and self._split
        self._sync = sync
        size = self.connection.size
        self._barriers = (
            [Barrier(f"{self.name}/barrier", self._server, self.rank, size)]
            if sync
            else [
                Barrier(f"{self.name}/barrier_{rank}", self._server, 0, 1)
                for rank in range(size)
            ]
        )
        self._barrier = self._barriers[0 if sync else self.rank]
        self._came: int | None = None

    def take(self, call: UpdateCall) -> None:
        there = self.variables.at_servers(call.optimizer, call.variables)
        with there, atomic.filled(True):
            call.run()

    @contextlib.contextmanager
    def in_trace(self) -> Iterator[None]:
        yield
        with after_writes():
            self._barrier.arrive()

    def _initialise(self) -> None:
        for number, barrier in enumerate(self._barriers):
            self._calls(("begin", number), barrier.begin)

    def check(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        for optimizer in optimizers:
            if takes_turns(optimizer, self.variables.trained):
                raise TowerError(
                    f"the optimizer {optimizer.name!r} accumulates gradients, "
                    "averages weights, scales the loss or has a constraint to "
                    "obey, which workers cannot do at the same time: use "
                    "SyncReplicasStrategy, which updates once for all of them."
                )
            if self._sync and self.rank == 0:
                _warn_of_differences(optimizer)

    def come_back(self) -> int:
        self._came = self._enter()
        if self._came == LEFT:
            self.workers.wait_for_end()
            raise FitEnded
        # Once more than it has made steps, unless it has not read the weights
        # that its last one led to.
        return self._came // 2

    def _enter(self) -> int:
        (came,) = self._calls("enter", self._barrier.enter)
        return int(came)

    def first(self) -> None:
        came, self._came = self._came, None
        if came is None:
            came = self._enter()
        if came == 0:
            self._calls("first", self._refresh)
        elif came % 2 == 0:
            self._calls("next", self._next_step)
        else:
            self._calls("wait", self._barrier.wait)

    def stepped(self) -> bool:
        (stopped,) = self._calls("next", self._next_step)
        return self._goes_on(value_of(stopped))

    def _next_step(self) -> tf.Tensor:
        """Get the weights when all updates have been made."""
        with tf.control_dependencies([self._barrier.wait()]):
            # Before the second wait: so all stop after the same step.
            stopped = self._store.read(self._stopped)
            with tf.control_dependencies([stopped]):
                self._refresh()
        return stopped

    def _refresh(self) -> None:
        """Get the weights, before anyone updates them again."""
        with tf.control_dependencies([done(self.variables.copy_here)]):
            arrived = self._barrier.arrive()
        with tf.control_dependencies(arrived):
            self._barrier.wait()

    def _leave(self) -> None:
        Functions(self.workers.run)("leave", self._barrier.leave)


def _warn_of_differences(optimizer: keras.optimizers.Optimizer) -> None:
    """Say why the weights will not be those of one device, if they will not."""
    config = optimizer.get_config()
    reasons = [
        f"{name}={config[name]}"
        for name in (
            *("momentum", "weight_decay"),
            *("clipnorm", "global_clipnorm", "clipvalue"),
        )
        if config.get(name)
    ]
    if not isinstance(optimizer, keras.optimizers.SGD):
        reasons.insert(0, type(optimizer).__name__)
    if isinstance(config.get("learning_rate"), dict):
        reasons.append("a schedule of learning rates, which counts updates")
    if reasons:
        logger.warning(
            "every worker updates the weights by itself, several times a step: "
            "with %s they will not be those of one device. "
            "SyncReplicasStrategy updates once a step.",
            ", ".join(reasons),
        )
