"""Weights that exist once, for all towers, each on a device of its own."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import variables as variables_lib


class SharedWeights:
    """Weights and slots that were put where a strategy wants to hold them.

    Args:
        strategy: its ``place(variable)`` names the device of a weight.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy
        # With what each was before, which the user may hold.
        self._before: dict[int, tuple[keras.Variable, tf.Variable]] = {}

    def share(self, variable: keras.Variable) -> bool:
        """Put a weight on the device that is to hold it.

        Returns:
            Whether it was not there.
        """
        if id(variable) in self._before:
            return False
        value = variable._value
        if isinstance(value, compat.DistributedVariable):
            value = variables_lib.unbind(value)
        self._move(variable, value, self._strategy.place(variable))
        return True

    def share_slots(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put an optimizer's slots beside the weights that they belong to."""
        weights = {
            weight.path.replace("/", "_"): weight
            for weight in optimizer._trainable_variables
            if id(weight) in self._before
        }
        for slot in optimizer.variables:
            # Keras names them by the weight, an underscore and their role.
            name = slot.name
            while name not in weights and "_" in name:
                name = name.rpartition("_")[0]
            if name in weights and id(slot) not in self._before:
                device = weights[name]._value.device
                self._move(slot, slot._value, device)

    def _move(
        self, variable: keras.Variable, value: tf.Variable, device: str
    ) -> None:
        moved = variables_lib.moved(value, device)
        # Noted first, so that a Ctrl-C in between is undone too.
        self._before[id(variable)] = variable, value
        variable._value = moved

    def give_back(self, variable: keras.Variable) -> bool:
        """Put a weight or slot back into the variable that it was before.

        Returns:
            Whether it was shared.
        """
        if id(variable) not in self._before:
            return False
        _, before = self._before[id(variable)]
        if before is not variable._value:
            before.assign(variable._value)
            variable._value = before
        del self._before[id(variable)]
        return True

    def give_all_back(self) -> None:
        """Give back all that is still shared."""
        for variable, _ in list(self._before.values()):
            self.give_back(variable)
