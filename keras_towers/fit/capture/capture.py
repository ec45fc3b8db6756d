"""A tower's step, run up to its optimizer.

Towers in turn, one trace for all of them, XLA, asynchronous towers and
``kt.verify`` all start from ``capture``, which alone intercepts the updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TakesGradients, UpdateCall


@dataclasses.dataclass
class Captured:
    """One run of a step: its logs, and its calls of optimizers, in order."""

    output: Any
    updates: list[UpdateCall]
    # Metrics, and the values that their ``result`` returned.
    results: list[tuple[Any, Any]]
    # Losses that should be means over the batch.
    losses: list[Any]
    metric_updates: list[tower_lib.MetricUpdate]
    # Whether the gradients are those of a weighted loss.
    loss_is_weighted: bool


def capture(
    step: Callable[[Any], Any],
    data: Any,
    tower: tower_lib.Tower,
    at_update: Callable[[UpdateCall], Any] | None = None,
) -> Captured:
    """Run a step whose optimizers record updates instead of applying them."""
    # A step whose second forward pass reads updated weights cannot be cut. Only
    # such a step has ``at_update``, which applies each update where the step
    # asks for it.
    recorder = _Recorder(tower.update, at_update)
    tower = dataclasses.replace(
        tower, update=recorder, results=[], losses=[], metric_updates=[]
    )
    with replica_context.activate(tower):
        # Metrics and moving statistics are assigned as usual.
        output = step(data)
    return Captured(
        output,
        recorder.updates,
        tower.results,
        tower.losses,
        tower.metric_updates,
        tower.loss_is_weighted,
    )


class _Recorder:
    """Records updates in place of the component that applies them."""

    def __init__(
        self,
        update: TakesGradients | None,
        at_update: Callable[[UpdateCall], Any] | None,
    ):
        self._update = update
        self._at_update = at_update
        self.updates: list[UpdateCall] = []

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        if self._update is not None:
            self._update.place_optimizer(optimizer)

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        tower = tower_lib.current()
        if tower is not None:
            tower.is_whole("builds an optimizer")
        if self._update is not None:
            self._update.make_ready(optimizer, variables)
        else:
            optimizer.build(variables)

    def apply(self, call: UpdateCall) -> None:
        self.updates.append(call)
        if self._at_update is not None:
            self._at_update(call)
