"""Calls of Keras's methods, with asynchronous training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.callbacks import Start
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.context.marks import recorder_of
from keras_towers.fit.contract import TRAINING
from keras_towers.fit.data.iterator import TowerEpochIterator
from keras_towers.fit.weights import trainers
from keras_towers.replicas.asynchronous.pace import Free, Pace
from keras_towers.replicas.asynchronous.staleness import (
    Staleness,
    write_staleness,
)
from keras_towers.replicas.asynchronous.tensorboard import with_writer
from keras_towers.replicas.asynchronous.threads import TowerThreads
from keras_towers.replicas.asynchronous.training import AsyncTraining, Steps
from keras_towers.replicas.asynchronous.update import (
    UpdateAlone,
    add_atomically,
)


class AsyncCalls(TowerCalls):
    """Runs training asynchronously and all other methods synchronously.

    Args:
        update: applies the gradients of a tower.

    Attributes:
        update: as given.
        staleness: the staleness of the steps of the last epoch.
        stall_shutdown_s: how long to wait for the end of any step; None: for
            ever.
    """

    stall_shutdown_s: float | None = None

    def __init__(self, update: UpdateAlone):
        super().__init__(update)
        self.update = update
        self.staleness: Staleness = Staleness()

    def pace(self) -> Pace:
        """Return when the towers of one more model may go on."""
        return Free(self.update)

    def open(
        self,
        model: keras.Model,
        kind: str,
        prepared: bool,
        start: Start | None,
    ) -> TowerCall:
        """Create the call object that Keras's loop uses."""
        if kind not in TRAINING:
            return super().open(model, kind, prepared, start)
        given = (self._step, self.adoption, model, kind, prepared, start)
        return _AsyncCall(self, *given)

    def _run(
        self,
        call: TowerCall,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        add_atomically()
        if call.kind == "fit":
            args, kwargs = with_writer(original, args, kwargs, self._write)
        return super()._run(call, original, args, kwargs)

    def also_logged(self) -> dict[str, Any]:
        """Return what an epoch's logs have besides those of the model."""
        return {}

    def _write(self, epoch: int) -> None:
        """Write what was observed of an epoch to TensorBoard."""
        write_staleness(self.staleness, epoch)


class TrainFunction:
    """The model's train function: runs the next steps of the current call."""

    def __init__(self, training: AsyncTraining):
        self.training = training

    def __call__(self, iterator: Any) -> Any:
        call = call_lib.current()
        if not isinstance(call, _AsyncCall):
            raise TowerError(
                "the train function of a model on asynchronous towers runs "
                "inside fit() and train_on_batch() only: call one of these."
            )
        return call.train(self.training, iterator)


class _AsyncCall(TowerCall):
    """A call of ``fit`` or ``train_on_batch`` on asynchronous towers."""

    def __init__(self, calls: AsyncCalls, *args: Any):
        super().__init__(*args)
        self._calls = calls
        self._steps = Steps(self.logs, fits=self.kind == "fit")

    def shadows(self) -> dict[str, Any]:
        return {
            **super().shadows(),
            "make_train_function": self._make_train_function,
        }

    def _make_train_function(self, force: bool = False) -> None:
        model = self.model
        if model.jit_compile:
            why = f"{self.config.name} trains without XLA"
            trainers.log_without_xla(model, True, why)
        if not isinstance(model.train_function, TrainFunction):
            model.train_function = TrainFunction(
                AsyncTraining(
                    self.config, self.adoption, self._calls.pace(), model
                )
            )
        elif force:
            model.train_function.training.forget()
            return
        if self._steps.fits and not model.run_eagerly:
            pace = model.train_function.training.pace
            self._steps.threads = TowerThreads(
                self.config.num_towers,
                pace,
                self._calls.stall_shutdown_s,
                recorder_of(model),
            )

    def _iterator(self, kind: str, **kwargs: Any) -> TowerEpochIterator:
        whole = kind == "fit"
        return TowerEpochIterator(
            self.config, kind, self.order, whole, **kwargs
        )

    def train(self, training: AsyncTraining, iterator: Any) -> Any:
        """Train on the next batches of Keras's loop."""
        at_last_step = self._steps.fits and self.epoch_iterator.at_last_step
        return training.train(self._steps, iterator, at_last_step)

    def end_of_steps(self, logs: Any) -> Any:
        function = self.model.train_function
        if not self._steps.fits or not isinstance(function, TrainFunction):
            return logs
        logs, seen = function.training.end(self._steps, logs)
        self._calls.staleness = seen
        return logs

    def _end(self, logs: Any) -> Any:
        logs = super()._end(logs)
        return {**logs, **self._calls.also_logged()}

    def settle(self, trains: bool) -> None:
        if self._steps.threads is not None:
            # To apply more for an evaluation would change the training.
            self._steps.threads.drain(whole=trains)

    def close(self) -> None:
        if self._steps.threads is not None:
            self._steps.threads.close()
