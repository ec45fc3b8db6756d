"""How the gradients of workers become the next weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.training_session import Session
from keras_towers.replicas.averages import (
    Averages,
    refuse_new_step,
    refuse_without_update,
    run_update,
)
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.hogwild import adds_atomically, takes_turns
from keras_towers.replicas.named_resources import (
    Queue,
    Queues,
    after_writes,
    variable,
)
from keras_towers.replicas.quorum import Quorum, ReplicaCounts
from keras_towers.replicas.replica_call import DroppedGradients
from keras_towers.replicas.replica_group import ReplicaEvent, ReplicaGroup


class WorkerUpdates:
    """Turns gradients into weights; methods in the order of a ``fit``.

    Attributes:
        reads_parts: whether a part of the weights can be read while another
            part is still updated.
        needs_all: whether no update is made without a gradient of each worker.
        epochs_together: whether all workers end each epoch together.
        spare: how many lost workers a step can do without.
    """

    reads_parts: bool = True
    needs_all: bool = False
    epochs_together: bool = False
    spare: int = 0

    def dropped_gradients(self) -> DroppedGradients | None:
        """Return the logger of dropped gradients, if any can be dropped."""
        return None

    def check_optimizers(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        """Refuse optimizers that these updates do not support."""

    def begin_trace(self) -> None:
        """Prepare for a new trace of the step."""

    def begin_fit(self) -> None:
        """Create the shared state of a ``fit``; on the chief only."""
        raise NotImplementedError

    def read_first_weights(self) -> None:
        """Read the weights of the first step."""
        raise NotImplementedError

    def come_back(self) -> int:
        """Go on after this worker was restarted; ``wait_for_weights`` follows.

        Returns:
            The number of batches that it had trained on.
        """
        raise NotImplementedError

    def trace_step(self) -> contextlib.AbstractContextManager[None]:
        """Trace a step, and the operation that counts it, in the block."""
        raise NotImplementedError

    def push(self, call: UpdateCall) -> None:
        """Push the sums of this worker's gradients, inside a traced step."""
        raise NotImplementedError

    def steps_before(self) -> tf.Tensor:
        """Return the number of steps before this one, inside a traced step."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Handle the end of a step of this worker."""

    def wait_for_part(self, part: int) -> tf.Tensor:
        """Wait for a part of the next weights."""
        raise NotImplementedError

    def wait_for_weights(self) -> tf.Tensor:
        """Wait for all of the next weights; ``END`` if there are none."""
        raise NotImplementedError

    def leave(self, stops: bool = False) -> None:
        """Let the other workers continue without this one, or stop them."""

    def is_over(self) -> bool:
        """Whether no update needs more gradients; on the chief."""
        return False

    def finish(self) -> None:
        """Make the last update, when all have left; on the chief only."""

    def clean_up(self) -> None:
        """Clean up after a ``fit`` that has ended or failed."""


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

    def check_optimizers(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        for optimizer in optimizers:
            if takes_turns(optimizer, self._session.variables.trained):
                raise TowerError(
                    f"the optimizer {optimizer.name!r} accumulates gradients, "
                    "averages weights, scales the loss or trains a weight with "
                    "a constraint, which concurrent workers cannot do: use "
                    "sync=True or SyncReplicasStrategy, which update once for "
                    "all of them."
                )

    def begin_fit(self) -> None:
        self._session.calls("begin", self._reset_counts)

    def _reset_counts(self) -> None:
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

    def read_first_weights(self) -> None:
        self._session.calls("enter", self._session.variables.pull)

    def come_back(self) -> int:
        (steps,) = self._session.calls("come back", self._come_back)
        return int(steps)

    def _come_back(self) -> tf.Tensor:
        self._clear(self._session.rank)
        steps = self.steps_before()
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
        with there, adds_atomically.holding(True):
            call.update_variables()

    def steps_before(self) -> tf.Tensor:
        with tf.device(self._server):
            return self._steps[self._session.rank].read_value()

    def wait_for_part(self, part: int) -> tf.Tensor:
        return self._queue(part).get()[0]

    def wait_for_weights(self) -> tf.Tensor:
        return self._queue(_WHOLE).get()[0]


class AveragedUpdates(WorkerUpdates):
    """Workers push gradients to accumulators; the chief applies averages.

    An update begins when enough gradients have arrived for all weights, so that
    a late gradient is dropped for all of them. ``EarlyUpdates`` begin earlier.
    """

    reads_parts = False
    _group_type: type[ReplicaGroup] = ReplicaGroup
    _coordinator_type: type[Coordinator] = Coordinator
    _run_update: Callable[..., Any] = staticmethod(run_update)

    def __init__(
        self,
        session: Session,
        quorum: Quorum,
        after_update: Callable[[Sequence[Any]], Any] = lambda variables: None,
    ):
        self._session = session
        self._rank = session.rank
        self.quorum = quorum
        self._after_update = after_update
        aggregate, size = quorum.aggregate, quorum.replicas
        self.spare = max(0, size - aggregate)
        self.epochs_together = session.splits_batches and not quorum.may_drop
        name = f"{session.name}/group"
        self._group = self._group_type(
            name, session.server, quorum, session.run_in_step
        )
        # The coordinator waits in a separate thread.
        self._coordinator_group = self._group.run_by(self._run_in_coordinator)
        self._traces = 0
        self._averages: Averages
        # With backup replicas, training ends when too few are left to make an
        # update; late replicas are not waited for.
        late_end = session.splits_batches and aggregate < size
        self._until_left = aggregate if late_end else None
        self._coordinator: Coordinator | None = None
        self._report_lost: Callable[[], None] = lambda: None
        self._abandoned = False
        # The key at which the chief publishes the counts.
        self._count_key = f"{name}/counts"

    def dropped_gradients(self) -> DroppedGradients | None:
        if self._rank > 0:
            return None
        return DroppedGradients(self.quorum, lambda: self.counts)

    @property
    def counts(self) -> ReplicaCounts:
        """The gradients that the last ``fit`` used and dropped."""
        if self._session.trains and self._rank > 0:
            raise TowerError(
                "while fit runs, only the chief knows counts: read them "
                "there, where strategy.is_chief is True, or after fit."
            )
        if self._coordinator is not None:
            return self._coordinator.counts
        counts = self._session.connection.store.get(self._count_key)
        if counts is None:
            return ReplicaCounts.none(self.quorum.replicas)
        updates, used, dropped = counts
        return ReplicaCounts(updates, tuple(used), tuple(dropped))

    def begin_trace(self) -> None:
        if self._session.trains:
            refuse_new_step()
        # A recompiled model may have other optimizers.
        self._traces += 1
        name = f"{self._session.name}/averages_{self._traces}"
        self._averages = Averages(
            name,
            self._group,
            lambda variable: self._session.variables.copy_of(variable).device,
            self._apply,
            self._publish_parts,
        )
        self._session.connection.dropped.drop_with(self._averages, name)

    def begin_fit(self) -> None:
        if self._session.fits == 1:
            self._group.initialize()
        self._averages.begin_fit()
        self._session.connection.store.put(self._count_key, None)

    def come_back(self) -> int:
        self._group.request_tokens(self._rank)
        return self._group.pushed(self._rank)

    def read_first_weights(self) -> None:
        self._coordinator = None
        self._group.send(ReplicaEvent.STARTED, self._rank)
        self._session.calls("first", self._read_first)

    def _read_first(self) -> None:
        with tf.control_dependencies([self._group.start_gradient(self._rank)]):
            self._session.variables.pull()

    def trace_step(self) -> contextlib.AbstractContextManager[None]:
        return self._averages.step_of(self._rank)

    def push(self, call: UpdateCall) -> None:
        self._averages.push(self._rank, call)

    def steps_before(self) -> tf.Tensor:
        return self._group.read_pushed(self._rank)

    def _apply(self, call: UpdateCall) -> None:
        variables = self._session.variables
        with variables.on_servers(call.optimizer, call.variables):
            call.update_variables()
            self._after_update(call.variables)

    def _publish_parts(self) -> None:
        """Publish, inside an update, which parts of the weights are ready."""

    def after_step(self) -> None:
        # The first step has been traced: Keras cannot trace in two threads.
        if self._rank == 0 and self._coordinator is None:
            self._coordinator = self._start_coordinator()

    def _start_coordinator(self) -> Coordinator:
        # The coordinator of an earlier fit has ended by now.
        self._abandoned = False
        apply = self._averages.updater(self._run_update)
        self._averages.join_fit()
        coordinator = self._coordinator_type(
            self._coordinator_group,
            apply,
            self._fail,
            self._until_left,
            self._group.send,
            self._session.peers.stall_shutdown_s,
        )
        self._report_lost = self._session.workers.loss_poller(
            lambda rank: self._coordinator_group.send(ReplicaEvent.LOST, rank)
        )
        coordinator.start()
        return coordinator

    def _run_in_coordinator(self, function: Any) -> list[Any]:
        """Run a concrete function that may wait for a long time."""
        with self._session.connection.naming_lost_servers():
            return RunningFunction(function).wait(poll=self._poll)

    def _poll(self) -> None:
        if self._abandoned:
            raise TowerError("the fit has failed")
        if self._coordinator is not None:
            self._coordinator.check_failed()
            self._report_lost()

    def _fail(self, error: BaseException) -> None:
        if self._abandoned:
            return
        self._session.workers.fail(error)
        # If the servers are lost, every worker notices it.
        with contextlib.suppress(tf.errors.OpError, TowerError):
            self._coordinator_group.send_end_to_all()

    def wait_for_weights(self) -> tf.Tensor:
        return self._group.wait_for_token(self._rank)

    def leave(self, stops: bool = False) -> None:
        self._group.send(ReplicaEvent.LEFT, self._rank)

    def is_over(self) -> bool:
        return self._coordinator is not None and self._coordinator.is_over

    def finish(self) -> None:
        if self._coordinator is not None:
            self._coordinator.wait_until_handled(ReplicaEvent.FLUSH)
            self._coordinator.stop()
            self._session.workers.check_failed()
            self._session.connection.store.put(
                self._count_key, dataclasses.astuple(self._coordinator.counts)
            )

    def clean_up(self) -> None:
        if self._coordinator is not None:
            self._abandoned = True
            self._coordinator.join(settings.ABANDON_S)
