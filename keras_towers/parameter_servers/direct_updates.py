"""Workers that apply their own gradients to the weights on the servers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers.barrier import Barrier
from keras_towers.parameter_servers.session import Session, WorkerUpdates
from keras_towers.replicas.asynchronous.hogwild import atomic, takes_turns
from keras_towers.replicas.averages import refuse_without_update
from keras_towers.replicas.resources import Functions, after_writes

logger = logging.getLogger("keras_towers")


class DirectUpdates(WorkerUpdates):
    """Every worker updates the weights on the servers independently.

    All workers come to a barrier when they have read the weights, and when they
    have updated them. Where nobody waits for others, each has a barrier of its
    own, which knows where a worker that comes back was.
    """

    def __init__(self, session: Session, sync: bool):
        self._session = session
        self._sync = sync
        self.epochs_together = sync and session.splits_batches
        size = session.peers.size
        self.spare = 0 if sync else size
        name, device, rank = session.name, session.server, session.rank
        if sync:
            self._barrier = Barrier(f"{name}/barrier", device, rank, size)
            self._barriers = [self._barrier]
        else:
            self._barriers = [
                Barrier(f"{name}/barrier_{other}", device, 0, 1)
                for other in range(size)
            ]
            self._barrier = self._barriers[rank]
        self._visits = 0
        self._taken = False

    def check(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        for optimizer in optimizers:
            if takes_turns(optimizer, self._session.variables.trained):
                raise TowerError(
                    f"the optimizer {optimizer.name!r} accumulates gradients, "
                    "averages weights, scales the loss or trains a weight with "
                    "a constraint, which concurrent workers cannot do: use "
                    "SyncReplicasStrategy, which updates once for all of them."
                )
            if self._sync and self._session.rank == 0:
                _warn_of_differences(optimizer)

    def begin(self, fit: int) -> None:
        for index, barrier in enumerate(self._barriers):
            self._session.calls(("begin", index), barrier.begin)

    def come_back(self) -> int:
        self._count_visits()
        # One more than twice its steps, unless it has not read the weights that
        # its last one led to.
        return self._visits // 2

    def _count_visits(self) -> None:
        (visits,) = self._session.calls("enter", self._barrier.enter)
        self._visits = int(visits)

    def enter(self, is_back: bool) -> bool:
        if not is_back:
            self._count_visits()
        if self._visits == 0:
            self._session.calls("first", self._read_first)
        elif self._visits % 2:
            self._session.calls("wait", self._barrier.wait_for_all)
        return self._visits > 0 and self._visits % 2 == 0

    def _read_first(self) -> None:
        variables = self._session.variables
        values = variables.read(variables.trained)
        self.have_read(values)
        variables.write_here(variables.trained, values)

    @contextlib.contextmanager
    def trace_step(self) -> Iterator[None]:
        self._taken = False
        yield
        variables, barrier = self._session.variables, self._barrier
        if variables.trained and not self._taken:
            refuse_without_update("which updates the weights on the servers")
        # Of each part as soon as its updates have been made, wherever they are.
        for index, part in enumerate(variables.parts):
            with tf.control_dependencies(variables.read(part)):
                barrier.publish_part(index)
        with after_writes():
            barrier.arrive()

    def take(self, call: UpdateCall) -> None:
        self._taken = True
        variables = self._session.variables
        there = variables.at_servers(call.optimizer, call.variables)
        with there, atomic.filled(True):
            call.run()

    def wait_for_part(self, part: int) -> tf.Tensor:
        return self._barrier.wait_for_end_of_step(part)

    def wait(self) -> tf.Tensor:
        with tf.device(self._session.server):
            return tf.reduce_max(self._barrier.wait_for_end_of_step())

    def have_read(self, values: Sequence[tf.Tensor]) -> None:
        # What has been read stays as it was while it is sent.
        with tf.control_dependencies(values):
            arrived = self._barrier.arrive()
        with tf.control_dependencies(arrived):
            self._barrier.wait_for_all()

    def leave(self) -> None:
        # Also once the chief has ended the fit.
        Functions(self._session.workers.run)("leave", self._barrier.leave)


def _warn_of_differences(optimizer: keras.optimizers.Optimizer) -> None:
    """Warn if the weights will differ from those of one device, and why."""
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
            "every worker updates the weights independently, several times "
            "per step: with %s they will differ from those of one device. "
            "SyncReplicasStrategy updates once per step.",
            ", ".join(reasons),
        )
