"""Workers that are replicas: each update averages the gradients of several."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers import remote
from keras_towers.replicas import Quorum, ReplicaCounts
from keras_towers.replicas.averages import Averages
from keras_towers.replicas.coordinator import Coordinator, EarlyCoordinator
from keras_towers.replicas.group import Event, Group
from keras_towers.replicas.servers.barrier import Notes
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.workers import FitEnded


class ReplicaSession(Session):
    """A model whose workers' gradients are averaged in accumulators."""

    def __init__(
        self,
        quorum: Quorum,
        after_update: Callable[[Sequence[Any]], Any],
        **given: Any,
    ):
        super().__init__(**given)
        self._quorum = quorum
        # Those that may be dropped are so as a whole: there an update begins
        # when enough have arrived.
        self.asks_ahead = early = quorum.each_once
        group = f"{self.name}/group"
        self._group = Group(
            group, self._server, quorum, self._run_in_step, early
        )
        self.notes = Notes(
            f"{group}/notes", self._server, self.rank, quorum.replicas, 1
        )
        self._calls = self._group.calls
        # The coordinator waits in a thread of its own.
        self._coordinated = self._group.by(self._coordinate)
        self._traces = 0
        self._averages: Averages
        self.retrace()
        self._after_update = after_update
        aggregate, size = quorum.aggregate, quorum.replicas
        self.spare = max(0, size - aggregate)
        # With backup replicas those that are late are waited for no longer
        # than until there are no updates that they could be part of.
        self._until_left = (
            aggregate if self.splits_batches and aggregate < size else None
        )
        self.in_step = self.splits_batches and not quorum.may_drop
        self._comes_back = False
        self._look: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        # On the chief only.
        self.coordinator: Coordinator | None = None
        # Where the chief tells what it has counted, and what it has told.
        self._count_key = f"{group}/counts"
        self._counts = ReplicaCounts.none(size)

    @property
    def counts(self) -> ReplicaCounts:
        """The gradients that the last ``fit`` used and dropped."""
        if self.coordinator is not None:
            return self.coordinator.counts
        if self.trains and self.rank > 0:
            raise TowerError(
                "while fit runs, counts are known to the chief only: ask for "
                "them where strategy.is_chief, or when fit has ended."
            )
        return self._counts

    def retrace(self) -> None:
        # A model that was compiled again may have other optimizers.
        self._traces += 1
        name = f"{self.name}/averages_{self._traces}"
        self._averages = Averages(
            name,
            self._group,
            lambda variable: self.variables.of(variable).device,
            self._apply,
            self._tell_parts,
        )
        self.connection.dropped.drop_with(self._averages, name)

    def take(self, call: UpdateCall) -> None:
        self._averages.push(self.rank, call)

    def in_trace(self) -> contextlib.AbstractContextManager[None]:
        return self._averages.step_of(self.rank)

    def _apply(self, call: UpdateCall) -> None:
        with self.variables.at_servers(call.optimizer, call.variables):
            call.run()
            self._after_update(call.variables)

    def _tell_parts(self) -> None:
        """Tell of each part of the weights as soon as it is updated."""
        if not self._group.early:
            return
        number = self._group.next_step()
        for part, variables in enumerate(self.variables.parts):
            with tf.control_dependencies(self.variables.read(variables)):
                self.notes.publish(0, number, part)

    def _initialise(self) -> None:
        self._calls("no notes", self.notes.begin)
        if self._fits == 1:
            self._group.initialise()
        self._averages.begin()

    def come_back(self) -> int:
        self._comes_back = True
        pushed = self._group.pushed(self.rank)
        self._group.enter(self.rank)
        return pushed

    def _first_step(self) -> None:
        self._error = self.coordinator = None
        back, self._comes_back = self._comes_back, False
        if not back:
            self._group.tell(Event.STARTED, self.rank)
            self._calls("first", self._first)
            return
        if self._group.early:
            self._calls("known", self._known_before)
        # What it had pushed may be part of the next update.
        if int(self._calls("next", self._next_step)[0]) < 0:
            raise FitEnded

    def _first(self) -> None:
        with tf.control_dependencies([self._known()]):
            self.variables.copy_here()

    def _known_before(self) -> tf.Tensor:
        return self.notes.reset(self._group.due(self.rank) - 1)

    def _known(self) -> tf.Tensor:
        return self.notes.reset(self._group.start(self.rank))

    def _finish_step(self) -> bool:
        if self.rank == 0 and self.coordinator is None:
            self.coordinator = self._started()
        self._check_error()
        if super()._finish_step():
            return True
        self.workers.check_failed()
        self._check_error()
        return False

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _due(self) -> tf.Tensor:
        return self._group.due(self.rank)

    def _turn(self, number: tf.Tensor) -> tf.Tensor:
        return self._group.wait(self.rank)

    def _started(self) -> Coordinator:
        # Keras cannot trace in several threads: the first step is traced now.
        kind, function = Coordinator, self._averages.function()
        if self._group.early:
            kind = EarlyCoordinator
            function = self._averages.function(remote.Running)
        self._averages.join()
        coordinator = kind(
            self._coordinated,
            function,
            self._failed,
            self._until_left,
            self._group.tell,
            self._peers.stall_shutdown_s,
        )
        losing = self.workers.losing(
            lambda rank: self._coordinated.tell(Event.LOST, rank)
        )

        def look() -> None:
            coordinator.check()
            losing()

        self._look = look
        coordinator.start()
        return coordinator

    def _coordinate(self, function: Any) -> list[Any]:
        """Call a concrete function that may wait for a long time."""
        with self.connection.naming_lost_servers():
            # What is looked at may change meanwhile.
            return remote.run(function, look=lambda: self._look())

    def _abandon(self) -> None:
        raise TowerError("the fit has failed")

    def _failed(self, error: BaseException) -> None:
        if self._look == self._abandon:
            return
        self._error = error
        self.workers.fail(error)
        try:
            for replica in range(self._quorum.replicas):
                self._coordinated.end(replica)
            self._coordinated.calls("release", self.notes.release)
        except (tf.errors.OpError, TowerError):
            return  # The servers are gone; every worker finds out by itself.

    def _is_over(self) -> bool:
        return self.coordinator is not None and self.coordinator.is_over

    def _leave(self) -> None:
        self._group.tell(Event.LEFT, self.rank)

    def _finish(self) -> None:
        if self.coordinator is not None:
            self.coordinator.settle(Event.FLUSH)
            self.coordinator.end()
        self._check_error()
        self._store.put(self._count_key, dataclasses.astuple(self.counts))

    def end(self, error: BaseException | None) -> None:
        try:
            super().end(error)
            if error is None and self.rank > 0:
                updates, *each = self._store.get(self._count_key)
                self._counts = ReplicaCounts(updates, *map(tuple, each))
        finally:
            if self.coordinator is not None:
                self._look = self._abandon
                self.coordinator.join(settings.ABANDON_S)
