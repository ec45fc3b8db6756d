"""One model trained by all workers: how they push and apply gradients.

Every worker computes with a local copy of the weights. A session makes the
next weights of its gradients: ``AveragedSession`` applies the average of all
workers' gradients once, and in an ``AsyncSession`` every worker applies its
own. ``worker_fit.py`` describes what a worker does during a ``fit``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat, settings
from keras_towers._types import ConcreteFunction, Structure, Variable
from keras_towers.errors import TowerError
from keras_towers.fit.components import ApplyCall
from keras_towers.fit.ranks.step_agreement import ComparedStep
from keras_towers.fit.weights.copies import copy_on_tower
from keras_towers.parameter_servers.key_value_store import value_of
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.server_connection import (
    Connection,
    ServerPeers,
)
from keras_towers.parameter_servers.server_variables import ServerVariables
from keras_towers.parameter_servers.workers import Workers
from keras_towers.rendezvous import rank_checks
from keras_towers.replicas import named_resources
from keras_towers.replicas.averages import (
    Averages,
    refuse_new_step,
    refuse_without_update,
)
from keras_towers.replicas.coordinator import Coordinator, EarlyCoordinator
from keras_towers.replicas.hogwild import adds_atomically, takes_turns
from keras_towers.replicas.named_resources import (
    Queue,
    TracedFunctions,
    after_writes,
    variable,
)
from keras_towers.replicas.replica_counts import Quorum, ReplicaCounts
from keras_towers.replicas.replica_group import END, ReplicaEvent, ReplicaGroup


class Session:
    """The training of one model by all workers of a job.

    Attributes:
        number: the rank of this worker, for what its steps compute.
        variables: their copies on the servers.
        workers: the workers of the ``fit`` that runs, or ran last.
        calls: runs operations; ``FitEnded`` once the chief has ended ``fit``.
        splits_batches: whether the workers share each batch.
        fits: the number of the ``fit`` that runs, or ran last.
        trains: whether a ``fit`` runs.
        needs_all: whether no update is made without a gradient of each worker.
        epochs_together: whether all workers end each epoch together.
        spare: how many lost workers a step can do without.
    """

    workers: Workers
    needs_all: bool = False
    epochs_together: bool = False
    spare: int = 0

    def __init__(self, peers: ServerPeers, number: int, splits_batches: bool):
        self.peers = peers
        self.connection: Connection = peers.connection
        self.rank: int = peers.rank
        # As a constant, it would make the steps of workers differ.
        with tf.init_scope(), tf.device(compat.HOST):
            rank = tf.constant(self.rank)
            self.number = tf.Variable(rank, trainable=False)
        self.name: str = f"{peers.prefix}/model_{number}"
        self.server: str = self.connection.devices[0]
        self.splits_batches = splits_batches
        self.variables: ServerVariables = ServerVariables(
            self.name,
            self.connection,
            lambda function: self.workers.wait_for(RunningFunction(function)),
        )
        self.calls: TracedFunctions = TracedFunctions(self._run_in_step)
        self.fits = 0
        self.trains = False
        # The key of the number of the last fit that the chief has stopped.
        self._stopped = f"{self.name}/stopped"
        self._freed = f"{self.name}/freed"
        # The random states after an even number of steps, and after an odd one.
        self._seeds = [f"{self.name}/seeds_{self.rank}_{i}" for i in range(2)]
        self.connection.dropped.drop_with(self, self.name)

    def _run_in_step(self, function: ConcreteFunction) -> list[tf.Tensor]:
        """Run a concrete function, unless the chief ends the ``fit``."""
        return self.workers.wait_for(RunningFunction(function), in_step=True)

    def stop(self, fit: int) -> None:
        """Stop all fits up to this number; on the chief only."""
        self.connection.store.put(self._stopped, fit)

    def last_stopped(self) -> int:
        """Return the number of the last ``fit`` that the chief has stopped."""
        return int(self.connection.store.get(self._stopped) or 0)

    def restore_seeds(self, steps: int) -> None:
        """Take over the random states of this worker after so many steps."""
        states = np.reshape(
            self.connection.store.get(self._seeds[steps % 2]), [-1, 2]
        )
        # Keras may not have made the generator of all layers again yet.
        for seed, state in zip(self.variables.seeds, states, strict=False):
            seed.assign(state)

    def upload(self, variables: Sequence[keras.Variable]) -> None:
        """Upload variables; does nothing on other workers than the chief."""
        if self.rank == 0 and self.fits:
            self.variables.upload(variables)

    # In the order of a ``fit``:

    def check_optimizers(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        """Refuse optimizers that the session does not support."""

    def begin_trace(self) -> None:
        """Prepare for a new trace of the step."""

    def compare(self, step: ComparedStep) -> None:
        """Compare a traced step with those of workers that have traced theirs.

        No worker waits for another, and the last one compares with all.

        Raises:
            TowerError: another worker has another step.
        """
        assert step.operations is not None
        store, key = self.connection.store, f"{self.name}/traced"
        own = *step.numbers, step.operations.checksums
        with tf.init_scope():
            store.put(f"{key}-{self.rank}", own)
            others = store.by_rank(key, range(self.peers.size))
        for rank, (exact, approximate, checksums) in others.items():
            if not step.is_like(exact, approximate):
                first = step.operations.first_beside(checksums)
                raise TowerError(
                    f"worker {self.rank} has another step than worker {rank}. "
                    f"{rank_checks.OPERATIONS}: "
                    f"{first or 'the value of a constant'}. "
                    f"{rank_checks.SAME_STEP}"
                )

    def begin_fit(self) -> None:
        """Begin a ``fit``: the chief uploads all variables."""
        # Local variables may have been replaced.
        self.variables.forget_traced()
        self.calls.forget()
        self._free_dropped()
        if self.rank == 0:
            self.variables.upload()
            self.stop(0)
            self._reset()
        elif (
            self.connection.starts > 1
            and self.connection.store.get(self._freed) is not None
        ):
            raise TowerError(
                f"worker {self.rank} of this job was restarted, and its script "
                "begins with a model that the chief had deleted: the parameter "
                "servers have freed its weights. Start all tasks of the job "
                "again, from a backup."
            )

    def _free_dropped(self) -> None:
        """Free the resources of models that the chief has deleted."""
        for name in self.connection.dropped.take_names():
            if self.rank > 0:
                named_resources.forget(name)
                continue
            self.connection.store.put(f"{name}/freed", True)
            with self.connection.naming_lost_servers():
                named_resources.free(name)

    def _reset(self) -> None:
        """Reset the state that workers share in a ``fit``; on the chief."""
        raise NotImplementedError

    def come_back(self) -> int:
        """Go on after this worker was restarted; ``read_weights`` follows.

        Returns:
            The number of batches that it had trained on.
        """
        raise NotImplementedError

    def prefetch_weights(self) -> None:
        """Begin to read the next weights while a step runs."""

    def read_weights(self) -> tuple[bool, int]:
        """Wait for the weights of the next step, and make them the local ones.

        Returns:
            Whether there are any, and ``last_stopped``.
        """
        raise NotImplementedError

    def trace_step(self, step: Callable[[], Structure]) -> Structure:
        """Trace a step, and the operations that count it."""
        result = step()
        with tf.control_dependencies([self._save_seeds()]):
            self._end_step()
        self.variables.refuse_writes(compat.get_default_graph())
        return result

    def push(self, call: ApplyCall) -> None:
        """Push the sums of this worker's gradients, inside a traced step."""
        raise NotImplementedError

    def _save_seeds(self) -> tf.Operation:
        """Save the random states that a step leaves, inside this step.

        If the worker dies before the step is counted, it needs the states that
        the step before had left: they are saved at the other key.
        """
        states = [
            copy_on_tower(seed._value).read_value()
            for seed in self.variables.seeds
        ]
        steps = self._steps_before()
        chosen = tf.math.floormod(steps + 1, tf.constant(2, steps.dtype))
        return self.connection.store.write(
            self._seeds, chosen, tf.reshape(states, [-1])
        )

    def _steps_before(self) -> tf.Tensor:
        """Return the number of steps before this one, inside a traced step."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """Count a step, after everything else in it."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Handle the end of a step of this worker."""

    def leave(self, stops: bool = False) -> None:
        """Let the other workers continue without this one, or stop them."""

    def is_over(self) -> bool:
        """Whether no update needs more gradients; on the chief."""
        return False

    def finish(self) -> None:
        """Make the last update, when all have left; on the chief only."""

    def clean_up(self) -> None:
        """Clean up after a ``fit`` that has ended or failed."""


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
            self._publish_parts,
        )
        self.connection.dropped.drop_with(self._averages, name)

    def _apply(self, call: ApplyCall) -> None:
        with self.variables.on_servers(call.optimizer, call.variables):
            call.update_variables()
            self._after_update(call.variables)

    def _publish_parts(self) -> None:
        """Publish, inside an update, which parts of the weights are ready."""
        if not self._early:
            return
        for index, part in enumerate(self.variables.parts):
            with tf.control_dependencies(self.variables.read(part)):
                self._group.publish_part(index)

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
            parts = self.variables.parts
            ahead = self.calls.traced(
                "ahead", lambda: self._read(parts, self._gate.get)
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
        parts: Sequence[Sequence[keras.Variable]] = (),
        gate: Callable[[], list[tf.Tensor]] = list,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        group = self._group
        values: list[tf.Tensor] = []
        trained: list[keras.Variable] = []
        for index, part in enumerate(parts):
            with tf.control_dependencies(
                [group.wait_for_part(self.rank, index)]
            ):
                values += self.variables.read(part)
                trained += part
        step = group.wait_for_step(self.rank)
        with tf.control_dependencies([step]):
            # Read with the weights, so that all workers stop after one step.
            stopped = self.connection.store.read(self._stopped)
            if not parts:
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
            raise TowerError("the fit has failed")
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
