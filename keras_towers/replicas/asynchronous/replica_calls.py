"""Calls of Keras's methods, with training steps of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.fit.callbacks import Start
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.contract import TRAINING
from keras_towers.replicas import ReplicaCounts
from keras_towers.replicas.asynchronous.calls import AsyncCalls, TrainFunction
from keras_towers.replicas.asynchronous.dropped import Dropped
from keras_towers.replicas.asynchronous.pace import Pace
from keras_towers.replicas.asynchronous.replicas import InStep
from keras_towers.replicas.asynchronous.update import UpdateAlone


class ReplicaCalls(AsyncCalls):
    """Runs training on replicas whose gradients are averaged.

    Args:
        update: as for ``AsyncCalls``.
        aggregate: how many gradients an update averages.
        shared: whether any replica may take any token.
        also: what to do with each update, or None.
        stall_shutdown_s: how long to wait for the end of any step.
    """

    def __init__(
        self,
        update: UpdateAlone,
        aggregate: int,
        shared: bool,
        also: Callable[[Sequence[Any]], Any] | None,
        stall_shutdown_s: float,
    ):
        super().__init__(update)
        self.stall_shutdown_s = stall_shutdown_s
        self._aggregate = aggregate
        self._shared = shared
        self._also = also
        self._last: InStep | None = None
        self._dropped = Dropped(self._config.num_replicas, aggregate, shared)

    @property
    def counts(self) -> ReplicaCounts:
        """What has become of the gradients of the last ``fit``."""
        if self._last is not None:
            return self._last.counts
        none = (0,) * self._config.num_replicas
        return ReplicaCounts(0, none, none)

    @property
    def _alone(self) -> bool:
        every = self._aggregate == 1 and self._also is None
        return super()._alone and every

    def pace(self) -> Pace:
        return InStep(
            self.update,
            self._config.num_replicas,
            self._aggregate,
            self._shared,
            self._begin,
            self._also,
            self.stall_shutdown_s,
        )

    def _begin(self, replicas: InStep) -> None:
        self._last = replicas
        self._dropped.begin()

    def open(
        self,
        model: keras.Model,
        kind: str,
        prepared: bool,
        start: Start | None,
    ) -> TowerCall:
        if kind in TRAINING and model.run_eagerly:
            raise TowerError(
                f"{self._config.name} needs compiled steps, but model "
                f"{model.name!r} is set to run_eagerly=True: compile it "
                "without, or debug it outside of the strategy."
            )
        function = model.train_function
        if kind == "fit" and isinstance(function, TrainFunction):
            pace = function.training.pace
            if isinstance(pace, InStep) and pace.runs:
                raise TowerError(
                    f"fit of model {model.name!r} is called inside its own "
                    f"fit, whose replicas are busy: {self._config.name} can "
                    "run train_on_batch there, or fit of another model."
                )
        return super().open(model, kind, prepared, start)

    def _run(
        self,
        call: TowerCall,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        result = super()._run(call, original, args, kwargs)
        if call.kind == "fit" and any(self.counts.dropped):
            announce(f"{self._config.name}: {self.counts}")
        return result

    def also_logged(self) -> dict[str, Any]:
        return self._dropped.logged(self.counts)

    def _write(self, epoch: int) -> None:
        self._dropped.write(epoch)
