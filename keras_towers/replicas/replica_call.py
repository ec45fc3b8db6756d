"""Calls of Keras's methods on replicas that each train whole batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.fit.calls import callback_roles, tower_call
from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.contract import KerasCall, TowerConfig
from keras_towers.fit.step.keras_function import TowerFunction
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.replicas.replica_group import Quorum, ReplicaCounts


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

    def logged(self) -> dict[str, Any]:
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


class OneFitPerModel(TowerCalls):
    """Calls of a strategy that runs one ``fit`` of a model at a time."""

    def __init__(self, update: WeightUpdate):
        super().__init__(update)
        # The ids of models.
        self._fitted: set[int] = set()

    def run_call(self, keras_call: KerasCall) -> Any:
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

    def _fit(self, keras_call: KerasCall) -> Any:
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

    def train(self, steps: Any, iterator: Any) -> Any:
        """Train on the next ``steps_per_execution`` batches."""
        raise NotImplementedError

    def _end_of_steps(self, logs: Any) -> Any:
        logs = super()._end_of_steps(logs)
        return {**logs, **self.dropped.logged()} if self.dropped else logs


class TrainFunction(TowerFunction):
    """Passes the next batches of Keras's loop to the current call."""

    def __init__(self, call: ReplicaCall, steps: Any):
        self._call_type = type(call)
        self.steps = steps

    def __call__(self, data: Any) -> Any:
        call = tower_call.current()
        if not isinstance(call, self._call_type):
            raise TowerError(self._call_type.refusal)
        return call.train(self.steps, data)


def refuse_eager(config: TowerConfig, model: keras.Model) -> None:
    """Refuse a model compiled with ``run_eagerly=True``."""
    if model.run_eagerly:
        raise TowerError(
            f"{config.name} needs compiled steps, but model {model.name!r} is "
            "set to run_eagerly=True: compile it without, or debug it outside "
            "of the strategy."
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

    def write_to_all(epoch: int, logs: Any) -> None:
        for board in boards:
            with board._train_writer.as_default():
                write(epoch)

    writer = keras.callbacks.LambdaCallback(on_epoch_end=write_to_all)
    arguments["callbacks"] = callback_roles.with_added(callbacks, writer)
