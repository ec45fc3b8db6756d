"""Calls of Keras's methods, with training steps of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.fit.callbacks import Start
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.contract import TRAINING
from keras_towers.replicas.asynchronous.calls import AsyncCalls, steps_of
from keras_towers.replicas.asynchronous.rounds import ReplicaSchedule
from keras_towers.replicas.asynchronous.schedule import UpdateSchedule
from keras_towers.replicas.asynchronous.update import HogwildUpdate
from keras_towers.replicas.counts import (
    DroppedGradients,
    ReplicaCounts,
    Rounds,
)
from keras_towers.replicas.fits import refuse_eager


class ReplicaCalls(AsyncCalls):
    """Runs training on replicas whose gradients are averaged.

    Args:
        stall_shutdown_s: how long to wait for the end of any step.
    """

    def __init__(
        self,
        update: HogwildUpdate,
        rounds: Rounds,
        alone: bool,
        stall_shutdown_s: float,
    ):
        super().__init__(update)
        self.stall_shutdown_s = stall_shutdown_s
        self._rounds = rounds
        self._runs_alone = alone
        self._last: ReplicaSchedule | None = None
        self._dropped = DroppedGradients(rounds, lambda: self.counts)

    @property
    def counts(self) -> ReplicaCounts:
        """What has become of the gradients of the last ``fit``."""
        if self._last is not None:
            return self._last.counts
        return ReplicaCounts.none(self._rounds.replicas)

    @property
    def _alone(self) -> bool:
        return super()._alone and self._runs_alone

    def schedule(self) -> UpdateSchedule:
        return ReplicaSchedule(
            self._update, self._rounds, self._begin, self.stall_shutdown_s
        )

    def _begin(self, schedule: ReplicaSchedule) -> None:
        self._last = schedule
        self._dropped.begin()

    def open(
        self,
        model: keras.Model,
        kind: str,
        prepared: bool,
        start: Start | None,
    ) -> TowerCall:
        if kind in TRAINING:
            refuse_eager(self._config, model)
        steps = steps_of(model)
        if kind == "fit" and steps is not None and steps.schedule.runs:
            raise TowerError(
                f"fit of model {model.name!r} is called inside its own fit, "
                f"whose replicas are busy: {self._config.name} can run "
                "train_on_batch there, or fit of another model."
            )
        return super().open(model, kind, prepared, start)

    def _run(
        self,
        call: TowerCall,
        original: Callable[..., Any],
        given: dict[str, Any],
    ) -> Any:
        result = super()._run(call, original, given)
        if call.kind == "fit" and any(self.counts.dropped):
            announce(f"{self._config.name}: {self.counts}")
        return result

    def also_logged(self) -> dict[str, Any]:
        return self._dropped.logged()

    def _write(self, epoch: int) -> None:
        self._dropped.write(epoch)
