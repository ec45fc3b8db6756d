"""Workers that apply their own gradients to the weights on the servers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.replicas.asynchronous.hogwild import atomic, takes_turns
from keras_towers.replicas.averages import refuse_without_update
from keras_towers.replicas.resources import Functions, after_writes
from keras_towers.replicas.servers.barrier import LEFT, Barrier
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.workers import FitEnded

logger = logging.getLogger("keras_towers")


class DirectSession(Session):
    """A model whose workers update the weights on the servers themselves."""

    # All workers come to a barrier when they have read the weights, and when
    # they have updated them. Where nobody waits for others, each has a barrier
    # of its own, which knows where a worker that comes back was.

    def __init__(self, sync: bool, **given: Any):
        super().__init__(**given)
        self.in_step = sync and self.splits_batches
        self._sync = sync
        size = self.connection.size
        self.spare = 0 if sync else size
        self._barriers = (
            [Barrier(f"{self.name}/barrier", self._server, self.rank, size)]
            if sync
            else [
                Barrier(f"{self.name}/barrier_{rank}", self._server, 0, 1)
                for rank in range(size)
            ]
        )
        self._barrier = self._barriers[0 if sync else self.rank]
        self.notes = self._barrier
        self._came: int | None = None
        self._taken = False

    def take(self, call: UpdateCall) -> None:
        self._taken = True
        there = self.variables.at_servers(call.optimizer, call.variables)
        with there, atomic.filled(True):
            call.run()

    @contextlib.contextmanager
    def in_trace(self) -> Iterator[None]:
        self._taken = False
        yield
        if self.variables.trained and not self._taken:
            refuse_without_update("which updates the weights on the servers")
        barrier = self._barrier
        # Of each part as soon as its updates have been made, wherever they are.
        for part, variables in enumerate(self.variables.parts):
            with tf.control_dependencies(self.variables.read(variables)):
                barrier.publish(barrier.rank, barrier.end_of_step_count(), part)
        with after_writes():
            barrier.arrive()

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

    def _first_step(self) -> None:
        came, self._came = self._came, None
        if came is None:
            came = self._enter()
        if came == 0:
            self._calls("first", self._first)
        elif came % 2 == 0:
            self._calls("next", self._next_step)
        else:
            self._calls("wait", lambda: self._barrier.wait())

    def _due(self) -> tf.Tensor:
        return self._barrier.end_of_step_count()

    def _turn(self, number: tf.Tensor) -> tf.Tensor:
        with tf.device(self._server):
            return tf.reduce_max(self.notes.wait(number))

    def _have_read(self, values: Sequence[tf.Tensor]) -> None:
        # What has been read stays as it was while it is sent.
        with tf.control_dependencies(values):
            arrived = self._barrier.arrive()
        with tf.control_dependencies(arrived):
            self._barrier.wait()

    def _first(self) -> None:
        trained = self.variables.trained
        values = self.variables.read(trained)
        self._have_read(values)
        self.variables.take(trained, values)

    def _leave(self) -> None:
        Functions(self.workers.run)("leave", self._barrier.leave)


def _warn_of_differences(optimizer: keras.optimizers.Optimizer) -> None:
    """Say why the weights will not be those of one device, if they will not."""
    config = optimizer.get_config()
    reasons = [
        f"{name}={config[name]}"
        for name in (
            "momentum",
            "weight_decay",
            "clipnorm",
            "global_clipnorm",
            "clipvalue",
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
