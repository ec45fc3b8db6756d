"""Weights that exist once for all towers, each on a chosen device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.slots import slots_of


class HeldOnce:
    """Moves weights and slot variables to chosen devices, and back.

    Args:
        place: returns the device to hold a given weight.
    """

    def __init__(self, place: Callable[[keras.Variable], str]):
        self._place = place
        # The original tf.Variable of each, to which users may hold references.
        self._before: ByIdentity[keras.Variable, tf.Variable] = ByIdentity()

    def hold(self, variable: keras.Variable) -> bool:
        """Move a weight to the device that is to hold it.

        Returns:
            False if it is held already.
        """
        if variable in self._before:
            return False
        value = variable._value
        if isinstance(value, compat.DistributedVariable):
            value = variables_lib.unbind(value)
        self._move(variable, value, self._place(variable))
        return True

    def hold_slots(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Move slot variables to the devices of their weights."""
        for slot, weight in slots_of(optimizer):
            if weight in self._before and slot not in self._before:
                self._move(slot, slot._value, weight._value.device)

    def _move(
        self, variable: keras.Variable, value: tf.Variable, device: str
    ) -> None:
        moved = variables_lib.moved(value, device)
        # Recorded first, so that a Ctrl-C in between is undone too.
        self._before[variable] = value
        variable._value = moved

    def give_back(self, variable: keras.Variable) -> bool:
        """Restore the original ``tf.Variable``, with the current value.

        Returns:
            Whether the variable was held.
        """
        if variable not in self._before:
            return False
        before = self._before[variable]
        if before is not variable._value:
            before.assign(variable._value)
            variable._value = before
        del self._before[variable]
        return True

    def give_all_back(self) -> None:
        """Restore every variable that is still held, whatever fails."""
        with contextlib.ExitStack() as stack:
            for variable in self._before:
                stack.callback(self.give_back, variable)
