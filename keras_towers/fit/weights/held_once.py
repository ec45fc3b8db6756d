"""Weights that exist once for all towers, each on one of several devices."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.weights import variables as variables_lib


class HeldOnce:
    """Weights and slots that were put where a strategy wants to hold them.

    Args:
        place: names the device that is to hold a weight.
    """

    def __init__(self, place: Callable[[keras.Variable], str]):
        self._place = place
        # With what each was before, which the user may hold.
        self._before: dict[int, tuple[keras.Variable, tf.Variable]] = {}

    def hold(self, variable: keras.Variable) -> bool:
        """Put a weight on the device that is to hold it.

        Returns:
            Whether it was not there.
        """
        if id(variable) in self._before:
            return False
        value = variable._value
        if isinstance(value, compat.DistributedVariable):
            value = variables_lib.unbind(value)
        self._move(variable, value, self._place(variable))
        return True

    def hold_slots(self, optimizer: keras.optimizers.Optimizer) -> None:
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
            Whether it was held.
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
        """Give back all that is still held."""
        for variable, _ in list(self._before.values()):
            self.give_back(variable)
