"""Workers that apply their own gradients to the weights on the servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.weights import state as state_lib
from keras_towers.replicas.asynchronous.update import (
    adding_atomically,
    takes_turns,
)
from keras_towers.replicas.averages import done
from keras_towers.replicas.resources import variable as named_variable
from keras_towers.replicas.servers.barrier import Barrier
from keras_towers.replicas.servers.session import Session

logger = logging.getLogger("keras_towers")


class DirectSession(Session):
    """A model whose workers update the weights on the servers themselves.

    Args:
        sync: whether all workers finish a step before any begins the next.
        split: whether every worker takes its part of each batch.
        **given: for ``Session``.
    """

    def __init__(self, sync: bool, split: bool, **given: Any):
        super().__init__(**given)
        self._traced: dict[Any, Any] = {}
        self._barrier: Barrier | None = None
        # What a barrier knows is known of workers without one by this.
        self._phase: int | None = None
        self._trained_on: Any = named_variable(
            f"{self.name}/trained_on/{self.rank}",
            self.connection.devices[0],
            (),
            tf.int64,
        )
        self.in_step = sync and split
        if sync:
            self._barrier = Barrier(
                f"{self.name}/barrier",
                self.connection.devices[0],
                self.rank,
                self.connection.size,
            )

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        sums: Sequence[Any],
    ) -> None:
        """Apply the gradients of this worker."""
        there = self.model.at_servers(optimizer, variables)
        with there, adding_atomically():
            original(list(sums), list(variables))

    def _call(
        self, name: Any, body: Callable[[], Any], in_step: bool = True
    ) -> Any:
        if name not in self._traced:
            with compat.single_device_mode():
                function = tf.function(body, autograph=False)
                self._traced[name] = function.get_concrete_function()
        run = self.run_in_step if in_step else self.run
        return run(self._traced[name])

    def forget_traces(self) -> None:
        super().forget_traces()
        self._traced.clear()

    def _initialise(self) -> None:
        if self._barrier is not None:
            self._call("clear", self._barrier.clear, in_step=False)

    def hold(self, model: keras.Model) -> None:
        super().hold(model)
        for optimizer in state_lib.collect(model).optimizers:
            if takes_turns(optimizer, self.model.trained):
                raise TowerError(
                    f"the optimizer {optimizer.name!r} accumulates gradients, "
                    "averages weights, scales the loss or has a constraint to "
                    "obey, which workers cannot do at the same time: use "
                    "SyncReplicasStrategy, which updates once for all of them."
                )

        if self._barrier is not None and self.rank == 0:
            for optimizer in state_lib.collect(model).optimizers:
                _warn_of_differences(optimizer)

    def come_back(self) -> int:
        barrier = self._barrier
        if barrier is None:
            (batches,) = self._call("batches", self._trained_on.read_value)
            return int(batches)
        barrier.begin()
        left = frozenset(self.workers.have_left() - {self.rank})
        (phase,) = self._call(("find", left), lambda: barrier.find(left))
        # The others come an odd number of times to read the weights, and an
        # even number of times when they have updated them.
        self._phase = int(phase)
        return self._phase // 2

    def first(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None and phase % 2 == 0:
            self._call("stepped", self._end_of_step)
            return
        if self._barrier is None:
            self._call("begun", self._begun)
        elif phase is None:
            self._barrier.begin()
        self._call("first", self._refresh)

    def _begun(self) -> None:
        with tf.device(self.connection.devices[0]):
            self._trained_on.assign(tf.constant(self.batches, tf.int64))

    def stepped(self) -> bool:
        (stopped,) = self._call("stepped", self._end_of_step)
        return self.goes_on(stopped)

    def _end_of_step(self) -> tf.Tensor:
        """Get the weights when all updates have been made."""
        if self._barrier is None:
            with tf.device(self.connection.devices[0]):
                self._trained_on.assign_add(tf.ones((), tf.int64))
            self._refresh()
            return self.stopped()
        with tf.control_dependencies([self._barrier.wait()]):
            # Before the second wait: so all stop behind the same step.
            stopped = self.stopped()
            with tf.control_dependencies([stopped]):
                self._refresh()
        return stopped

    def _refresh(self) -> None:
        """Get the weights, before anyone updates them again."""
        here = done(self.model.copy_here)
        if self._barrier is not None:
            with tf.control_dependencies([here]):
                self._barrier.wait()

    def _leave(self) -> None:
        if self._barrier is not None:
            self._call("leave", self._barrier.leave, in_step=False)


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
