"""Workers as replicas: each update averages the gradients of several."""

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
from keras_towers.parameter_servers.barrier import Notes
from keras_towers.parameter_servers.served_model import ServedModel
from keras_towers.parameter_servers.session import WorkerUpdates
from keras_towers.replicas.averages import Averages
from keras_towers.replicas.coordinator import Coordinator, EarlyCoordinator
from keras_towers.replicas.group import Event, Group
from keras_towers.replicas.quorum import Quorum, ReplicaCounts


class AveragedUpdates(WorkerUpdates):
    """Workers push gradients to accumulators; the chief applies averages."""

    def __init__(
        self,
        served: ServedModel,
        quorum: Quorum,
        after_update: Callable[[Sequence[Any]], Any],
    ):
        self._served = served
        self._quorum = quorum
        self._after_update = after_update
        aggregate, size = quorum.aggregate, quorum.replicas
        self.spare = max(0, size - aggregate)
        self.epochs_together = served.splits_batches and not quorum.may_drop
        # Gradients that may be dropped are so as a whole: there an update
        # begins when enough have arrived.
        self.reads_parts = quorum.each_once
        name = f"{served.name}/group"
        self._group = Group(
            name, served.server, quorum, served.run_in_step, quorum.each_once
        )
        # The coordinator waits in a thread of its own.
        self._coordinated = self._group.run_by(self._coordinate)
        self.notes = Notes(f"{name}/notes", served.server, served.rank, size, 1)
        self._traces = 0
        self._averages: Averages
        # With backup replicas those that are late are waited for no longer
        # than until there are no updates that they could be part of.
        late_end = served.splits_batches and aggregate < size
        self._until_left = aggregate if late_end else None
        self._coordinator: Coordinator | None = None
        self._comes_back = False
        self._abandoned = False
        # Where the chief publishes what it has counted.
        self._count_key = f"{name}/counts"

    @property
    def counts(self) -> ReplicaCounts:
        """The gradients that the last ``fit`` used and dropped."""
        if self._coordinator is not None:
            return self._coordinator.counts
        counts = self._served.connection.store.get(self._count_key)
        if counts is None:
            return ReplicaCounts.none(self._quorum.replicas)
        updates, used, dropped = counts
        return ReplicaCounts(updates, tuple(used), tuple(dropped))

    def begin_trace(self) -> None:
        # A model that was compiled again may have other optimizers.
        self._traces += 1
        name = f"{self._served.name}/averages_{self._traces}"
        self._averages = Averages(
            name,
            self._group,
            lambda variable: self._served.variables.copy_of(variable).device,
            self._apply,
            self._publish_parts,
        )
        self._served.connection.dropped.drop_with(self._averages, name)

    def begin(self, fit: int) -> None:
        self._group.calls("no notes", self.notes.begin)
        if fit == 1:
            self._group.initialise()
        self._averages.begin()
        self._served.connection.store.put(self._count_key, None)

    def come_back(self) -> int:
        self._comes_back = True
        pushed = self._group.pushed(self._served.rank)
        self._group.enter(self._served.rank)
        return pushed

    def enter(self) -> bool:
        self._coordinator = None
        comes_back, self._comes_back = self._comes_back, False
        if not comes_back:
            self._group.send(Event.STARTED, self._served.rank)
            self._served.calls("first", self._read_first)
        elif self._group.early:
            self._group.calls("known", lambda: self.notes.reset(self.due() - 1))
        # What it had pushed may be part of the next update.
        return comes_back

    def _read_first(self) -> None:
        step = self._group.start(self._served.rank)
        with tf.control_dependencies([self.notes.reset(step)]):
            self._served.variables.copy_here()

    def trace_step(self) -> contextlib.AbstractContextManager[None]:
        return self._averages.step_of(self._served.rank)

    def take(self, call: UpdateCall) -> None:
        self._averages.push(self._served.rank, call)

    def _apply(self, call: UpdateCall) -> None:
        variables = self._served.variables
        with variables.at_servers(call.optimizer, call.variables):
            call.run()
            self._after_update(call.variables)

    def _publish_parts(self) -> None:
        """Publish each part of the weights as soon as it is updated."""
        if not self._group.early:
            return
        variables = self._served.variables
        number = self._group.next_step()
        for index, part in enumerate(variables.parts):
            with tf.control_dependencies(variables.read(part)):
                self.notes.publish(0, number, index)

    def after_step(self) -> None:
        # Keras cannot trace in several threads: the first step is traced now.
        if self._served.rank == 0 and self._coordinator is None:
            self._coordinator = self._start_coordinator()

    def _start_coordinator(self) -> Coordinator:
        # Until now that of an earlier fit may have been about to end.
        self._abandoned = False
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
            self._group.send,
            self._served.peers.stall_shutdown_s,
        )
        self._poll_lost = self._served.workers.loss_poller(
            lambda rank: self._coordinated.send(Event.LOST, rank)
        )
        coordinator.start()
        return coordinator

    def _coordinate(self, function: Any) -> list[Any]:
        """Call a concrete function that may wait for a long time."""
        with self._served.connection.naming_lost_servers():
            return remote.Running(function).wait(poll=self._poll)

    def _poll(self) -> None:
        if self._abandoned:
            raise TowerError("the fit has failed")
        if self._coordinator is not None:
            self._coordinator.check()
            self._poll_lost()

    def _failed(self, error: BaseException) -> None:
        if self._abandoned:
            return
        self._served.workers.fail(error)
        # If the servers are gone, every worker finds out by itself.
        with contextlib.suppress(tf.errors.OpError, TowerError):
            self._coordinated.end_all()
            self._coordinated.calls("release", self.notes.release)

    def due(self) -> tf.Tensor:
        return self._group.due(self._served.rank)

    def wait(self, number: tf.Tensor) -> tf.Tensor:
        return self._group.wait(self._served.rank)

    def leave(self) -> None:
        self._group.send(Event.LEFT, self._served.rank)

    def is_over(self) -> bool:
        return self._coordinator is not None and self._coordinator.is_over

    def finish(self) -> None:
        if self._coordinator is not None:
            self._coordinator.settle(Event.FLUSH)
            self._coordinator.end()
            self._served.workers.check_failed()
            self._served.connection.store.put(
                self._count_key, dataclasses.astuple(self._coordinator.counts)
            )

    def end(self) -> None:
        if self._coordinator is not None:
            self._abandoned = True
            self._coordinator.join(settings.ABANDON_S)
