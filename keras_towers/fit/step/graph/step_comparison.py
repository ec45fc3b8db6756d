"""What ranks compare of a step that they have traced, and share of it."""

from __future__ import annotations

import weakref

import keras

from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.step.graph.program_text import text_of
from keras_towers.fit.step.graph.step_inputs import capture
from keras_towers.fit.step.graph.step_layout import (
    StepLayout,
    describe_variable,
)
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.writes import OuterVariable


class StepComparison:
    """Compares steps over ranks, and shares variables outside of models.

    Args:
        update: the update of weights, with the order of steps.
    """

    def __init__(self, update: WeightUpdate):
        self._update = update
        self._outer: weakref.WeakKeyDictionary[
            keras.Model, dict[int, OuterVariable]
        ] = weakref.WeakKeyDictionary()

    def outer_variables(self, model: keras.Model) -> list[OuterVariable]:
        """Return the variables outside of a model that its steps use."""
        return [*self._outer.get(model, {}).values()]

    def compare(self, layout: StepLayout) -> None:
        """Compare a step over ranks; share rank 0's outer variables."""
        order = self._update.order
        traced, settings = layout.traced, layout.settings
        model, ranks = settings.model, settings.places.ranks
        shares_step = ranks.step.size > 1
        if ranks.job.size == 1 or not (shares_step or settings.trains):
            return
        exchanges = [
            f"{e.kind} {e.given.dtype.name} {e.result.shape}"
            for e in layout.program.exchanges
            if not e.gradient
        ]
        outside = traced.variables_outside(model)
        variables = [
            f"outside of the model: {describe_variable(capture(handle))}"
            for handle in outside
        ]
        compared = ComparedStep(
            text_of(traced, model, [*exchanges, *variables]),
            layout.divided.spec,
            layout.divided.fingerprint,
        )
        if not shares_step:
            self._update.note_own_step(compared)
            if ranks.in_lockstep:
                order.compare_in_rounds(compared)
            return
        copies_of = self._update.variables.handles_of_copies
        others = [copies_of(handle) or [handle] for handle in outside]
        known = self._outer.setdefault(model, {})
        for handles in others:
            outer = OuterVariable(handles, self._update.config.devices)
            known.setdefault(id(handles[0]), outer)
        order.compare(compared, others, self._update.config.devices)
