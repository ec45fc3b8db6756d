"""Updates that every worker makes without waiting for other workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers.session import Session, WorkerUpdates
from keras_towers.replicas.asynchronous.hogwild import atomic, takes_turns
from keras_towers.replicas.averages import refuse_without_update
from keras_towers.replicas.resources import (
    Queue,
    Queues,
    after_writes,
    variable,
)

_WHOLE = "whole"


class AsyncUpdates(WorkerUpdates):
    """Every worker applies its gradients to the weights on the servers.

    The server counts each worker's steps, for a worker that is restarted.
    """

    def __init__(self, session: Session):
        self._session = session
        self.spare = session.peers.size
        name, self._server = session.name, session.server
        self._steps = [
            variable(f"{name}/steps_{rank}", self._server, (), tf.int64)
            for rank in range(session.peers.size)
        ]
        # Signal, for each worker and each part of the weights, that the
        # worker's update of a step has been applied, and it can read the part.
        self._updated = Queues(f"{name}/updated", self._server)
        self._taken = False

    def check(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        for optimizer in optimizers:
            if takes_turns(optimizer, self._session.variables.trained):
                raise TowerError(
                    f"the optimizer {optimizer.name!r} accumulates gradients, "
                    "averages weights, scales the loss or trains a weight with "
                    "a constraint, which concurrent workers cannot do: use "
                    "sync=True or SyncReplicasStrategy, which update once for "
                    "all of them."
                )

    def begin(self) -> None:
        self._session.calls("begin", self._begin)

    def _begin(self) -> None:
        with tf.device(self._server):
            for steps in self._steps:
                steps.assign(tf.zeros((), tf.int64), read_value=False)
        # The chief frees the queues of all workers, which it creates here.
        for rank in range(len(self._steps)):
            self._clear(rank)

    def _clear(self, rank: int) -> None:
        parts = len(self._session.variables.parts)
        for part in (*range(parts), _WHOLE):
            self._updated[f"{rank}/{part}"].clear()

    def _queue(self, part: int | str) -> Queue:
        return self._updated[f"{self._session.rank}/{part}"]

    def enter(self) -> None:
        self._session.calls("enter", self._session.variables.pull)

    def come_back(self) -> int:
        (steps,) = self._session.calls("come back", self._come_back)
        return int(steps)

    def _come_back(self) -> tf.Tensor:
        self._clear(self._session.rank)
        with tf.device(self._server):
            steps = self._steps[self._session.rank].read_value()
        self._queue(_WHOLE).put(steps)
        return steps

    @contextlib.contextmanager
    def trace_step(self) -> Iterator[None]:
        self._taken = False
        yield
        variables = self._session.variables
        if variables.trained and not self._taken:
            refuse_without_update("which updates the weights on the servers")
        # A part is ready as soon as its updates have been applied.
        for index, part in enumerate(variables.parts):
            with tf.control_dependencies(variables.read(part)):
                self._queue(index).put(0)
        with after_writes(), tf.device(self._server):
            steps = self._steps[self._session.rank]
            counted = steps.assign_add(tf.ones((), tf.int64))
            self._queue(_WHOLE).put(tf.identity(counted))

    def push(self, call: UpdateCall) -> None:
        self._taken = True
        variables = self._session.variables
        there = variables.on_servers(call.optimizer, call.variables)
        with there, atomic.filled(True):
            call.run()

    def wait_for_part(self, part: int) -> tf.Tensor:
        return self._queue(part).get()[0]

    def wait(self) -> tf.Tensor:
        return self._queue(_WHOLE).get()[0]
