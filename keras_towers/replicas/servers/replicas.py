"""Workers that are replicas: each update averages the gradients of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat, settings
from keras_towers.errors import TowerError
from keras_towers.parameter_servers import remote
from keras_towers.replicas import Coordinator, Group, ReplicaCounts
from keras_towers.replicas.averages import Averages, Part
from keras_towers.replicas.events import Event
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.workers import FitEnded

_HOST = "/device:CPU:0"


class ReplicaSession(Session):
    """A model whose workers' gradients are averaged in accumulators.

    Args:
        aggregate: how many gradients an update averages, R.
        shared: whether any worker may take any token.
        split: whether all workers have parts of the same batches.
        also: what to do with each update, given its trained variables, or None.
        **given: for ``Session``.
    """

    def __init__(
        self,
        aggregate: int,
        shared: bool,
        split: bool,
        also: Callable[[Sequence[Any]], Any] | None,
        **given: Any,
    ):
        super().__init__(**given)
        size, first = self.connection.size, self.connection.devices[0]
        group = f"{self.name}/group", first, size, aggregate, shared
        self._group = Group(*group, self.run_in_step)
        # The coordinator waits in a thread of its own.
        self._coordinated = Group(*group, self._coordinate)
        self._traces = 0
        self._averages: Averages
        self.retrace()
        self._also = also
        # With backup replicas those that are late are waited for no longer
        # than until there are no updates that they could be part of.
        self._until_left = aggregate if split and aggregate < size else None
        self.in_step = split and aggregate >= size and not shared
        self._coordinator: Coordinator | None = None
        self._comes_back = False
        self._look: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._counts: ReplicaCounts | None = None
        with tf.init_scope(), compat.single_device_mode(), tf.device(_HOST):
            self._step, self._pushed = (
                tf.Variable(0, dtype=tf.int64, trainable=False)  # pyright: ignore[reportArgumentType]
                for _ in range(2)
            )

    @property
    def counts(self) -> ReplicaCounts:
        """What has become of the gradients; on the chief only."""
        if self._coordinator is not None:
            return self._coordinator.counts
        none = (0,) * self.connection.size
        return self._counts or ReplicaCounts(0, none, none)

    def retrace(self) -> None:
        # A model that was compiled again may have other optimizers.
        self._traces += 1
        name = f"{self.name}/averages_{self._traces}"
        self._averages = Averages(
            name, self._group, self._device_of, self._apply
        )
        self.connection.dropped.drop_with(self._averages, name)
        self._function: Any = None
        self._checked = False

    def forget_traces(self) -> None:
        super().forget_traces()
        self._group.forget("first", "again", "stepped", "anew")

    def _device_of(self, variable: Any) -> str:
        if variable not in self.model.masters:
            with self.model.at_servers(None, [variable]):
                pass
        return self.model.masters.of(variable).device

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        sums: Sequence[Any],
    ) -> None:
        """Push the gradients of this worker."""
        number = self._pushed.read_value()
        pushed = self._averages.push(
            optimizer,
            original,
            variables,
            sums,
            self._step.read_value(),
            self._group.number(self.rank, number),
        )
        with tf.control_dependencies(pushed):
            # Without a write TensorFlow would prune them.
            self._pushed.assign(number, read_value=False)

    def _apply(self, part: Part, averages: list[Any]) -> None:
        with self.model.at_servers(part.optimizer, part.variables):
            part.original(averages, part.variables)
            if self._also is not None:
                self._also(part.variables)

    def _initialise(self) -> None:
        if self._fits == 1:
            self._group.initialise()
        else:
            self._averages.begin()
        self._group.clear()

    def come_back(self) -> int:
        self._comes_back = True
        return self._group.come_back(self.rank)

    def first(self) -> None:
        self._error = None
        self._averages.begin_trace()
        back, self._comes_back = self._comes_back, False
        if back and not self._group.shared:
            # What it had pushed may be part of the next update.
            token, _ = self._group.call("again", self._next_step)
            if int(token) < 0:
                raise FitEnded
            return
        if not back:
            self._group.clear_tokens(self.rank)
            self._group.tell(Event.JOINED, self.rank)
        self._group.call("first", self._first)

    def _first(self) -> None:
        step = self._group.step.read_value()
        with tf.control_dependencies([self._step.assign(step)]):
            self.model.copy_here()

    def stepped(self) -> bool:
        if not self._checked:
            self._averages.end_trace()
            self._checked = True
        if self.rank == 0 and self._coordinator is None:
            self._start()
        if self._error is not None:
            raise self._error
        token, stopped = self._group.call("stepped", self._end_of_step)
        if int(token) >= 0:
            return self.goes_on(stopped)
        self.workers.check_failed()
        if self._error is not None:
            raise self._error
        return False

    def _start(self) -> None:
        # Keras cannot trace in several threads: the first step is traced now.
        if self._function is None:
            self._function = self._averages.function()
            self._averages.join()
        self._look = self.workers.losing(
            lambda rank: self._coordinated.tell(Event.LOST, rank)
        )
        self._coordinator = Coordinator(
            self._coordinated,
            self._function,
            self._failed,
            self._until_left,
            self._group.tell,
            self.stall_shutdown_s,
        )
        self._coordinator.start()

    def _coordinate(self, function: Any) -> Any:
        """Call a concrete function that may wait for a long time."""
        with self.connection.naming_lost_servers():
            return remote.run(function, look=self._look)

    def _abandon(self) -> None:
        raise TowerError("the fit has failed")

    def _failed(self, error: BaseException) -> None:
        if self._look == self._abandon:
            return
        self._error = error
        self.workers.fail(error)
        try:
            for replica in range(self.connection.size):
                self._coordinated.end(replica)
        except (tf.errors.OpError, TowerError):
            return  # The servers are gone; every worker finds out by itself.

    def _end_of_step(self) -> tuple[tf.Tensor, tf.Tensor]:
        group = self._group
        self._pushed.assign_add(1, read_value=False)
        arrived = group.arrive(self.rank, self._step.read_value())
        with tf.control_dependencies([arrived]):
            return self._next_step()

    def _next_step(self) -> tuple[tf.Tensor, tf.Tensor]:
        token = self._group.get_token(self.rank)
        with tf.control_dependencies([token]):
            step = self._group.local_step(token)
            mine = self._step.assign(step)
        with tf.control_dependencies([mine]):
            self.model.copy_here()
            return token, self.stopped()

    def _is_over(self) -> bool:
        return self._coordinator is not None and self._coordinator.is_over

    def _leave(self) -> None:
        self._group.tell(Event.LEFT, self.rank)

    def _finish(self) -> None:
        if self._coordinator is not None:
            self._coordinator.flush()
            self._coordinator.end()
            self._counts = self._coordinator.counts
            self._coordinator = None
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        try:
            super().end(error)
        finally:
            coordinator, self._coordinator = self._coordinator, None
            if coordinator is not None:
                self._counts = coordinator.counts
                self._look = self._abandon
                coordinator.join(settings.ABANDON_S)
