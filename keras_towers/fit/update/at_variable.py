"""Weights that exist once, updated on the device that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_towers import compat
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.moved import MovedVariables
from keras_towers.fit.weights.slots import slots_of
from keras_towers.reduction import Gradient, Gradients, sum_at_variables


class UpdateAtVariable(UpdateOnce):
    """Every trained weight exists once; gradients are summed on its device."""

    # Non-trainable weights get a component on every tower, because a step may
    # write them. ``place`` returns the device to hold a given weight.

    name = "at_variable"
    description = "trained weights exist once and are updated in place"
    _shares_buffers = False

    def __init__(
        self, config: TowerConfig, place: Callable[[keras.Variable], str]
    ):
        super().__init__(config)
        self._place = place
        self._held = MovedVariables(empties=False)

    def place(self, variable: keras.Variable) -> bool:
        """Hold a trainable weight once; spread any other."""
        spread = isinstance(variable._value, variables_lib.TowerVariable)
        if not variable.trainable or spread:
            return super().place(variable)
        if variable in self._held:
            return False
        if isinstance(variable._value, compat.DistributedVariable):
            variable._value = variables_lib.unbind(variable._value)
        self._held.place(variable, self._place(variable))
        return True

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Intercept the optimizer's calls; put slots beside their weights."""
        super().place_optimizer(optimizer)
        if optimizer.built:
            for slot, weight in slots_of(optimizer):
                if weight in self._held and slot not in self._held:
                    self._held.place(slot, weight._value.device)

    def take_back(self, variable: keras.Variable) -> bool:
        return self._held.give_back(variable)

    def release(self) -> None:
        try:
            self._held.give_all_back()
        finally:
            super().release()

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        places = [getattr(v, "_value", v).device for v in variables]
        sums = sum_at_variables(rows, self.config.devices, places)
        return [sums for _ in self.config.devices]
