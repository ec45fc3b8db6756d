"""Averaged updates: servers apply the mean of all workers' gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_towers.fit.components import ApplyCall
from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import (
    ConcreteFunction,
    Structure,
    Variable,
)
from keras_towers.parameter_servers.key_value_store import value_of
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.server_connection import ServerPeers
from keras_towers.parameter_servers.training_session import Session
from keras_towers.replicas.averages import Averages, refuse_new_step
from keras_towers.replicas.coordinator import Coordinator, EarlyCoordinator
from keras_towers.replicas.named_resources import Queue
from keras_towers.replicas.replica_counts import Quorum, ReplicaCounts
from keras_towers.replicas.replica_group import END, ReplicaEvent, ReplicaGroup


class AveragedSession(Session):
    """Workers push gradients to accumulators; the chief applies averages.

    If every worker computes one gradient of each update, none is dropped, and
    updates begin early: a weight is updated as soon as all of its gradients
    have arrived, and read as soon as it is updated, while gradients of other
    weights are still being received. This uses both directions of a link.
    Otherwise an update begins when enough gradients have arrived for all
    weights, so that a late gradient is dropped for all of them.
    """

    def __init__(
        self,
        peers: ServerPeers,
        number: int,
        splits_batches: bool,
        quorum: Quorum,
        after_update: Callable[
            [Sequence[Variable]], object
        ] = lambda variables: None,
    ):
        super().__init__(peers, number, splits_batches)
        self.quorum = quorum
        self._after_update = after_update
        self._early = quorum.one_each
        self.needs_all = self._early
        self.spare = max(0, quorum.replicas - quorum.aggregate)
        self.epochs_together = splits_batches and not quorum.may_drop
        name = f"{self.name}/group"
        self._group = ReplicaGroup(
            name, self.server, quorum, self._run_in_step, self._early
        )
        # The coordinator waits in a separate thread.
        self._coordinator_group = self._group.run_by(self._run_in_coordinator)
        self._traces = 0
        self._averages: Averages
        # Reads the next weights while a step runs. Opening the gate makes it
        # write them, when the step no longer reads the local variables.
        self._prefetch: RunningFunction | None = None
        self._gate = Queue(f"{self.name}/gate", compat.HOST)
        # With backup replicas, training ends when too few are left to make an
        # update; late replicas are not waited for.
        late_end = splits_batches and self.spare > 0
        self._until_left = quorum.aggregate if late_end else None
        self._coordinator: Coordinator | None = None
        self._report_lost: Callable[[], None] = lambda: None
        self._abandoned = False
        # The key at which the chief publishes the counts.
        self._count_key = f"{name}/counts"

    @property
    def counts(self) -> ReplicaCounts:
        """The gradients that the last ``fit`` used and dropped."""
        if self.trains and self.rank > 0:
            raise TowerError(
                "while fit runs, only the chief knows counts: read them "
                "if strategy.is_chief is True, or after fit."
            )
        if self._coordinator is not None:
            return self._coordinator.counts
        counts = self.connection.store.get(self._count_key)
        if counts is None:
            return ReplicaCounts.none(self.quorum.replicas)
        updates, used, dropped = counts
        return ReplicaCounts(updates, tuple(used), tuple(dropped))

    def begin_trace(self) -> None:
        if self.trains:
            refuse_new_step()
        # A recompiled model may have other optimizers.
        self._traces += 1
        name = f"{self.name}/averages_{self._traces}"
        self._averages = Averages(
            name,
            self._group,
            lambda variable: self.variables.copy_of(variable).device,
            self._apply,
            self._publish_chunks,
        )
        self.connection.dropped.drop_with(self._averages, name)

    def _apply(self, call: ApplyCall) -> None:
        with self.variables.on_servers(call.optimizer, call.variables):
            call.update_variables()
            self._after_update(call.variables)

    def _publish_chunks(self) -> None:
        """Publish, inside an update, which chunks of the weights are ready."""
        if not self._early:
            return
        for index, chunk in enumerate(self.variables.chunks):
            with tf.control_dependencies(self.variables.read(chunk)):
                self._group.publish_chunk(index)

    def _reset(self) -> None:
        self._coordinator = None
        if self.fits == 1:
            self._group.initialize()
        self._averages.begin_fit()
        self.connection.store.put(self._count_key, None)

    def come_back(self) -> int:
        return self._group.come_back(self.rank)

    def prefetch_weights(self) -> None:
        if self._early and self._prefetch is None:
            chunks = self.variables.chunks
            ahead = self.calls.traced(
                "ahead", lambda: self._read(chunks, self._gate.get)
            )
            self._prefetch = RunningFunction(ahead)

    def read_weights(self) -> tuple[bool, int]:
        if self._prefetch is None:
            step, stopped = self.calls("next", self._read)
        else:
            running, self._prefetch = self._prefetch, None
            self._gate.put(0)
            step, stopped = self.workers.wait_for(running, in_step=True)
        return int(step) < END, value_of(stopped) or 0

    def _read(
        self,
        chunks: Sequence[Sequence[keras.Variable]] = (),
        gate: Callable[[], list[tf.Tensor]] = list,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        group = self._group
        values: list[tf.Tensor] = []
        trained: list[keras.Variable] = []
        for index, chunk in enumerate(chunks):
            with tf.control_dependencies(
                [group.wait_for_chunk(self.rank, index)]
            ):
                values += self.variables.read(chunk)
                trained += chunk
        step = group.wait_for_step(self.rank)
        with tf.control_dependencies([step]):
            # Read with the weights, so that all workers stop after one step.
            stopped = self.connection.store.read(self._stopped)
            if not chunks:
                trained = self.variables.trained
                values = self.variables.read(trained)
        with tf.control_dependencies([step, *gate()]):
            self.variables.assign_local(trained, values)
        return step, stopped

    def _cancel_prefetch(self) -> None:
        """Cancel a ``prefetch_weights``."""
        if self._prefetch is not None:
            self._prefetch.cancel()
            self._prefetch = None
        self._gate.clear()

    def trace_step(self, step: Callable[[], Structure]) -> Structure:
        with self._averages.tracing():
            return super().trace_step(step)

    def push(self, call: ApplyCall) -> None:
        self._averages.push(self.rank, call)

    def _steps_before(self) -> tf.Tensor:
        return self._group.read_pushed(self.rank)

    def _end_step(self) -> None:
        self._averages.end_step(self.rank)

    def after_step(self) -> None:
        # The first step has been traced: Keras cannot trace in two threads.
        if self.rank == 0 and self._coordinator is None:
            self._coordinator = self._start_coordinator()

    def _start_coordinator(self) -> Coordinator:
        # The coordinator of an earlier fit has ended by now.
        self._abandoned = False
        update = self._averages.update_function()
        self._averages.join_fit()

        def begin(count: int) -> RunningFunction:
            return RunningFunction(update, [tf.constant(count)])

        def apply(count: int) -> tf.Tensor:
            (averaged,) = self._wait_in_coordinator(begin(count))
            return averaged

        early = self._early
        coordinator = (EarlyCoordinator if early else Coordinator)(
            self._coordinator_group,
            begin if early else apply,
            self._fail,
            self.peers.stall_timeout_s,
            self._until_left,
            self._group.send,
        )
        self._report_lost = self.workers.loss_poller(
            lambda rank: self._coordinator_group.send(ReplicaEvent.LOST, rank)
        )
        coordinator.start()
        return coordinator

    def _run_in_coordinator(
        self, function: ConcreteFunction
    ) -> list[tf.Tensor]:
        """Run a concrete function that may wait for a long time."""
        return self._wait_in_coordinator(RunningFunction(function))

    def _wait_in_coordinator(self, running: RunningFunction) -> list[tf.Tensor]:
        with self.connection.naming_lost_servers():
            return running.wait(poll=self._poll)

    def _poll(self) -> None:
        if self._abandoned:
            raise TowerError(
                "fit has failed on the chief, which applies no more updates"
            )
        if self._coordinator is not None:
            self._coordinator.check_failed()
            self._report_lost()

    def _fail(self, error: BaseException) -> None:
        if self._abandoned:
            return
        self.workers.fail(error)
        # If the servers are lost, every worker notices it.
        with contextlib.suppress(tf.errors.OpError, TowerError):
            self._coordinator_group.send_end_to_all()

    def leave(self, stops: bool = False) -> None:
        self._cancel_prefetch()
        stopped = stops and self._early
        event = ReplicaEvent.STOPPED if stopped else ReplicaEvent.LEFT
        self._group.send(event, self.rank)

    def is_over(self) -> bool:
        return self._coordinator is not None and self._coordinator.is_over

    def finish(self) -> None:
        if self._coordinator is not None:
            self._coordinator.wait_until_handled(ReplicaEvent.FLUSH)
            self._coordinator.stop()
            self.workers.check_failed()
            self.connection.store.put(
                self._count_key, dataclasses.astuple(self._coordinator.counts)
            )

    def clean_up(self) -> None:
        self._cancel_prefetch()
        if self._coordinator is not None:
            self._abandoned = True
            self._coordinator.join(settings.ABANDON_S)
