"""Runs calls of Keras's methods on replicas, here or on workers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.calls import callback_roles, tower_call
from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.calls.tower_runner import TowerRunner
from keras_towers.fit.components import (
    FitStart,
    KerasCall,
    TowerConfig,
    TowerFunction,
)
from keras_towers.fit.context import patches
from keras_towers.fit.data.data_use import DataUse
from keras_towers.fit.step.graph.step_clock import recorder_of
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.model_state import eager_cause, runs_eagerly
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import announce
from keras_towers.foundation.object_types import Logs, Structure, Variable
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.hogwild import SHARED_STATE, HogwildUpdate
from keras_towers.replicas.replica_counts import Quorum, ReplicaCounts
from keras_towers.replicas.staleness import Staleness
from keras_towers.replicas.tower_threads import (
    ReplicaSteps,
    TowerSteps,
    TowerThreads,
)


class DroppedGradients:
    """Logs the gradients dropped in each epoch of one ``fit``."""

    def __init__(self, quorum: Quorum, counts: Callable[[], ReplicaCounts]):
        self._quorum = quorum
        self._counts = counts
        # Dropped before the last epoch, and in it.
        self._before = self._epoch = (0,) * quorum.replicas

    def announce(self, name: str) -> None:
        """Announce the counts if any gradient was dropped."""
        counts = self._counts()
        if any(counts.dropped):
            announce(f"{name}: {counts}")

    def logged(self) -> dict[str, int]:
        """Return additional logs of an epoch that ends."""
        if not self._quorum.may_drop:
            return {}
        before, self._before = self._before, self._counts().dropped
        self._epoch = tuple(
            now - then for now, then in zip(self._before, before, strict=True)
        )
        return {"dropped_gradients": sum(self._epoch)}

    def write(self, epoch: int) -> None:
        """Write the number for each replica to TensorBoard."""
        if self._quorum.may_drop:
            for replica, dropped in enumerate(self._epoch):
                name = f"dropped_gradients/replica_{replica}"
                tf.summary.scalar(name, dropped, step=epoch)


class OneFitPerModel(TowerRunner):
    """Calls of a strategy that runs one ``fit`` of a model at a time."""

    def __init__(self, update: WeightUpdate):
        super().__init__(update)
        # The ids of models.
        self._fitted: set[int] = set()

    def run_call(self, keras_call: KerasCall) -> Structure:
        """Run a call; refuse a ``fit`` inside a ``fit`` of the same model."""
        if keras_call.kind != "fit":
            return super().run_call(keras_call)
        model = keras_call.model
        if id(model) in self._fitted:
            raise TowerError(
                f"fit of model {model.name!r} is called inside its own fit, "
                f"which {self._config.name} cannot do: call fit of another "
                "model there, or fit again afterwards."
            )
        self._fitted.add(id(model))
        try:
            return self._fit(keras_call)
        finally:
            self._fitted.remove(id(model))

    def _fit(self, keras_call: KerasCall) -> Structure:
        return super().run_call(keras_call)


class ReplicaCall(TowerCall):
    """A call that gets the batches of Keras's loop from ``TrainFunction``."""

    refusal: str
    dropped: DroppedGradients | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if self.dropped is not None:
            add_summary_writer(self.keras_call.arguments, self.dropped.write)
        with super().installed():
            yield
        if self.dropped is not None:
            self.dropped.announce(self.config.name)

    def train(self, steps: Any, iterator: Iterator[Structure]) -> Logs:
        """Train on the next ``steps_per_execution`` batches."""
        raise NotImplementedError

    def _end_of_steps(self, logs: Logs) -> Logs:
        logs = super()._end_of_steps(logs)
        return (
            {**(logs or {}), **self.dropped.logged()} if self.dropped else logs
        )


class TrainFunction(TowerFunction):
    """Passes the next batches of Keras's loop to the current call."""

    def __init__(self, call: ReplicaCall, steps: Any):
        self._call_type = type(call)
        self.steps = steps

    def __call__(self, data: Iterator[Structure]) -> Logs:
        call = tower_call.current()
        if not isinstance(call, self._call_type):
            raise TowerError(self._call_type.refusal)
        call.prepare_all()
        return call.train(self.steps, data)


def refuse_eager(config: TowerConfig, model: keras.Model) -> None:
    """Refuse a model whose steps run eagerly."""
    if runs_eagerly(model):
        raise TowerError(
            f"{config.name} needs compiled steps, but model {model.name!r} "
            f"runs eagerly, by {eager_cause(model)}: leave this out, or debug "
            "outside of the strategy."
        )


def add_summary_writer(
    arguments: dict[str, Any], write: Callable[[int], None]
) -> None:
    """Add a callback that writes summaries, if there is a ``TensorBoard``."""
    callbacks = arguments.get("callbacks")
    boards = [
        callback
        for callback in callback_roles.listed(callbacks)
        if isinstance(callback, keras.callbacks.TensorBoard)
    ]
    if not boards:
        return

    def write_to_all(epoch: int, logs: Logs) -> None:
        for board in boards:
            with board._train_writer.as_default():
                write(epoch)

    writer = keras.callbacks.LambdaCallback(on_epoch_end=write_to_all)
    arguments["callbacks"] = callback_roles.with_added(callbacks, writer)


class RunsReplicas(TowerRunner):
    """Runs training on replicas whose gradients are averaged."""

    @property
    def counts(self) -> ReplicaCounts:
        """How many gradients the last ``fit`` used and dropped."""
        raise NotImplementedError

    def updated(self, variable: keras.Variable) -> Variable:
        """Return the variable that is updated for a weight of the model."""
        return variable.value


class AsyncRunner(TowerRunner):
    """Runs training asynchronously and all other methods synchronously."""

    stall_timeout_s: float | None = None

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
        return _ThreadedCall(self, keras_call, prepared, start)


class ReplicaRunner(OneFitPerModel, AsyncRunner, RunsReplicas):
    """Runs training on replicas of this process."""

    def __init__(self, update: HogwildUpdate, quorum: Quorum):
        super().__init__(update)
        self.stall_timeout_s = update.config.options.stall_timeout_s
        self._quorum = quorum
        self._last: Coordinator | None = None

    @property
    def counts(self) -> ReplicaCounts:
        if self._last is None:
            return ReplicaCounts.none(self._quorum.replicas)
        return self._last.counts

    @property
    def runs_plain_keras(self) -> bool:
        # One replica has counts, too, and may average several batches.
        return False

    def make_steps(self, model: keras.Model) -> TowerSteps:
        return ReplicaSteps(self._update, model, self._quorum, self._begin)

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

    def __init__(self, runner: AsyncRunner, *args: Any):
        super().__init__(runner, *args)
        self._runner = runner
        # None if one step runs at a time: eager ones, and ``train_on_batch``.
        self._threads: TowerThreads | None = None
        self._logs: Logs = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if self.kind == "fit":
            self._runner.staleness = Staleness()
            if self.dropped is None:
                add_summary_writer(
                    self.keras_call.arguments,
                    lambda epoch: self._runner.staleness.write(epoch),
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
            steps = steps or self._runner.make_steps(model)
            steps.alone = model.train_function
            model.train_function = TrainFunction(self, steps)
        runs_alone = self.kind != "fit" or runs_eagerly(model)
        if self._threads is not None or runs_alone:
            return
        self._threads = TowerThreads(
            self.config.num_towers,
            steps,
            self._runner.stall_timeout_s,
            recorder_of(model),
        )

    def _data_use(self, kind: str) -> DataUse:
        return dataclasses.replace(super()._data_use(kind), whole=kind == "fit")

    def train(self, steps: TowerSteps, iterator: Any) -> Logs:
        if self._threads is None:
            assert steps.alone is not None
            return steps.alone(iterator)
        assert self.epoch_iterator is not None
        at_end = self.epoch_iterator.at_last_step
        batches = itertools.islice(iterator, self.model.steps_per_execution)
        # Always one ahead.
        batch = next(batches)
        while batch is not None:
            traced = steps.for_batches(iterator.element_spec)
            following = next(batches, None)
            is_last = at_end and following is None
            self._threads.submit(traced, batch, is_last)
            batch = following
        self._refresh_logs(self._threads, at_end)
        return self._logs

    def _refresh_logs(self, threads: TowerThreads, at_end: bool) -> None:
        if at_end:
            threads.drain()
            finish = self._original_method("_get_metrics_result_or_logs")
            self._logs = finish(threads.latest)
            return
        if self._logs is None:
            # Callbacks expect all log names after the first step.
            threads.wait_for_a_step()
        if threads.latest is not None:
            self._logs = threads.latest

    def finish_steps(self, logs: Logs) -> Logs:
        threads = self._threads
        if threads is None:
            return logs
        threads.drain()
        self._runner.staleness = threads.take_staleness()
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
