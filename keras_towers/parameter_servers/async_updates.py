"""Asynchronous updates: each worker applies its gradients on the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_towers.fit.components import ApplyCall
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure
from keras_towers.parameter_servers.server_connection import ServerPeers
from keras_towers.parameter_servers.training_session import Session
from keras_towers.replicas.averages import refuse_without_update
from keras_towers.replicas.hogwild import adds_atomically, takes_turns
from keras_towers.replicas.named_resources import after_writes, variable


class AsyncSession(Session):
    """Every worker applies its gradients to the weights on the servers.

    The server counts each worker's steps, for a worker that is restarted.
    """

    def __init__(self, peers: ServerPeers, number: int, splits_batches: bool):
        super().__init__(peers, number, splits_batches)
        self.spare = peers.size
        self._steps = [
            variable(f"{self.name}/steps_{rank}", self.server, (), tf.int64)
            for rank in range(peers.size)
        ]
        self._has_pushed = False

    def check_optimizers(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        for optimizer in optimizers:
            if takes_turns(optimizer, self.variables.trained):
                raise TowerError(
                    f"the optimizer {optimizer.name!r} accumulates gradients, "
                    "averages weights, scales the loss or trains a weight with "
                    "a constraint, which concurrent workers cannot do: use "
                    "sync=True or SyncReplicasStrategy, which update once for "
                    "all of them."
                )

    def _reset(self) -> None:
        def body() -> None:
            with tf.device(self.server):
                for steps in self._steps:
                    steps.assign(tf.zeros((), tf.int64), read_value=False)

        self.calls("reset", body)

    def come_back(self) -> int:
        (steps,) = self.calls("come back", self._steps_before)
        return int(steps)

    def read_weights(self) -> tuple[bool, int]:
        # The step has done so.
        return True, self.last_stopped()

    def trace_step(self, step: Callable[[], Structure]) -> Structure:
        self._has_pushed = False
        result = super().trace_step(step)
        # Each weight is read after its update, and then written when the step
        # has read the local one.
        self.variables.pull()
        return result

    def push(self, call: ApplyCall) -> None:
        self._has_pushed = True
        there = self.variables.on_servers(call.optimizer, call.variables)
        with there, adds_atomically.holding(True):
            call.update_variables()

    def _steps_before(self) -> tf.Tensor:
        with tf.device(self.server):
            return self._steps[self.rank].read_value()

    def _end_step(self) -> None:
        if self.variables.trained and not self._has_pushed:
            refuse_without_update("which updates the weights on the servers")
        with after_writes(), tf.device(self.server):
            one = tf.ones((), tf.int64)
            self._steps[self.rank].assign_add(one, read_value=False)
