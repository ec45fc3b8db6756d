"""Calls of Keras's methods, with asynchronous training steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import keras

from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.context import patches
from keras_towers.fit.contract import FitStart, KerasCall
from keras_towers.fit.data.epoch_iterator import TowerEpochIterator
from keras_towers.fit.step.global_step import log_without_xla
from keras_towers.fit.step.marks import recorder_of
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.hogwild import (
    SHARED_STATE,
    HogwildUpdate,
)
from keras_towers.replicas.replica_call import (
    DroppedGradients,
    OneFitPerModel,
    ReplicaCall,
    TrainFunction,
    add_summary_writer,
    refuse_eager,
)
from keras_towers.replicas.replica_group import Quorum, ReplicaCounts
from keras_towers.replicas.staleness import Staleness
from keras_towers.replicas.tower_steps import (
    ReplicaSteps,
    TowerSteps,
)
from keras_towers.replicas.tower_threads import TowerThreads


class AsyncCalls(TowerCalls):
    """Runs training asynchronously and all other methods synchronously."""

    stall_shutdown_s: float | None = None

    def __init__(self, update: HogwildUpdate):
        super().__init__(update)
        self._update = update
        self.staleness: Staleness = Staleness()

    def make_steps(self, model: keras.Model) -> TowerSteps:
        """Return the steps of one more model."""
        return TowerSteps(self._update, model)

    def make_call(
        self, keras_call: KerasCall, prepared: bool, start: FitStart | None
    ) -> TowerCall:
        if not keras_call.trains:
            return super().make_call(keras_call, prepared, start)
        return _ThreadedCall(
            self, self._step, self.adoption, keras_call, prepared, start
        )


class ReplicaCalls(OneFitPerModel, AsyncCalls):
    """Runs training on replicas whose gradients are averaged."""

    def __init__(
        self,
        update: HogwildUpdate,
        quorum: Quorum,
        stall_shutdown_s: float,
    ):
        super().__init__(update)
        self.stall_shutdown_s = stall_shutdown_s
        self._quorum = quorum
        self._last: Coordinator | None = None

    @property
    def counts(self) -> ReplicaCounts:
        """How many gradients the last ``fit`` used and dropped."""
        if self._last is None:
            return ReplicaCounts.none(self._quorum.replicas)
        return self._last.counts

    @property
    def runs_plain_keras(self) -> bool:
        # One replica has counts, too, and may average several batches.
        return False

    def make_steps(self, model: keras.Model) -> TowerSteps:
        return ReplicaSteps(
            self._update,
            model,
            self._quorum,
            self._begin,
            self.stall_shutdown_s,
        )

    def _begin(self, coordinator: Coordinator) -> None:
        self._last = coordinator

    def make_call(
        self, keras_call: KerasCall, prepared: bool, start: FitStart | None
    ) -> TowerCall:
        if keras_call.trains:
            refuse_eager(self._config, keras_call.model)
        call = super().make_call(keras_call, prepared, start)
        if keras_call.kind == "fit" and isinstance(call, _ThreadedCall):
            call.dropped = DroppedGradients(self._quorum, lambda: self.counts)
        return call


class _ThreadedCall(ReplicaCall):
    """A call of ``fit`` or ``train_on_batch`` on asynchronous towers."""

    refusal = (
        "the train function of a model on asynchronous towers runs inside "
        "fit() and train_on_batch() only: call one of these."
    )

    def __init__(self, calls: AsyncCalls, *args: Any):
        super().__init__(*args)
        self._calls = calls
        # None if one step runs at a time: eager ones, and ``train_on_batch``.
        self._threads: TowerThreads | None = None
        self._logs: Any = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if self.kind == "fit":
            self._calls.staleness = Staleness()
            if self.dropped is None:
                add_summary_writer(
                    self.keras_call.arguments,
                    lambda epoch: self._calls.staleness.write(epoch),
                )
        with patches.patched_while_used(SHARED_STATE), super().installed():
            yield

    def _make_step_function(self, kind: str, force: bool = False) -> None:
        if kind != "train":
            return super()._make_step_function(kind, force)
        model, steps = self.model, steps_of(self.model)
        if steps is None or force:
            if steps is not None:
                steps.forget()
            model.train_function = None
            super()._make_step_function(kind, force)
            steps = steps or self._calls.make_steps(model)
            steps.alone = model.train_function
            model.train_function = TrainFunction(self, steps)
        runs_alone = self.kind != "fit" or model.run_eagerly
        if self._threads is not None or runs_alone:
            return
        if model.jit_compile:
            why = f"{self.config.name} trains without XLA"
            log_without_xla(model, True, why)
        self._threads = TowerThreads(
            self.config.num_towers,
            steps,
            self._calls.stall_shutdown_s,
            recorder_of(model),
        )

    def _make_iterator(self, kind: str, **kwargs: Any) -> TowerEpochIterator:
        return super()._make_iterator(kind, whole=kind == "fit", **kwargs)

    def train(self, steps: TowerSteps, iterator: Any) -> Any:
        if self._threads is None:
            assert steps.alone is not None
            return steps.alone(iterator)
        taken = 0
        batches = itertools.islice(iterator, self.model.steps_per_execution)
        for batch in batches:
            taken += 1
            traced = steps.for_batches(iterator.element_spec)
            self._threads.submit(traced, batch)
        if not taken:
            raise StopIteration
        self._refresh_logs(self._threads)
        return self._logs

    def _refresh_logs(self, threads: TowerThreads) -> None:
        if self.epoch_iterator.at_last_step:
            threads.drain()
            finish = self._original_method("_get_metrics_result_or_logs")
            self._logs = finish(threads.latest)
            return
        if self._logs is None:
            # Callbacks expect all log names after the first step.
            threads.wait_for_a_step()
        if threads.latest is not None:
            self._logs = threads.latest

    def finish_steps(self, logs: Any) -> Any:
        threads = self._threads
        if threads is None:
            return logs
        threads.drain()
        self._calls.staleness = threads.take_staleness()
        if threads.latest is not None:
            self._logs = threads.latest
        # The next epoch shows these logs until one of its steps has ended.
        threads.latest = None
        return logs if self._logs is None else self._logs

    def wait_for_steps(self, trains: bool) -> None:
        if self._threads is not None:
            # An evaluation must not cause an update of too few gradients.
            self._threads.drain(flush=trains)

    def end_threads(self) -> None:
        if self._threads is not None:
            self._threads.close()


def steps_of(model: keras.Model) -> TowerSteps | None:
    """Return a model's traced asynchronous steps, if any."""
    steps = getattr(model.train_function, "steps", None)
    return steps if isinstance(steps, TowerSteps) else None
