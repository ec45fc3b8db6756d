"""Variables on chosen devices, until they are given back."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from keras_towers.devices import same_device
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.placement import byte_size


class MovedVariables:
    """Moves variables to chosen devices, and back."""

    def __init__(self, empties: bool = True) -> None:
        self._empties = empties
        # The original tf.Variable of each, to which users may hold references,
        # and the device that it goes back to.
        self._before: ByIdentity[keras.Variable, tuple[tf.Variable, str]] = (
            ByIdentity()
        )

    def __contains__(self, variable: keras.Variable) -> bool:
        return variable in self._before

    def place(
        self, variable: keras.Variable, device: str, home: str | None = None
    ) -> None:
        """Move a variable."""
        # Its home is where it is to be in the end, by default where it was
        # before its first move.
        value = variable._value
        if variable in self._before:
            variable._value = variables_lib.moved(value, device)
            return
        # Recorded first, so that a Ctrl-C in between is undone too.
        self._before[variable] = value, home or value.device
        variable._value = variables_lib.moved(value, device)
        if self._empties and variable._value is not value:
            overwrite(value, tf.zeros([0], value.dtype))

    def forget(self, variable: keras.Variable) -> tf.Variable:
        """Return the original ``tf.Variable`` without restoring it."""
        before, _ = self._before[variable]
        del self._before[variable]
        return before

    def bytes_on(self, device: str) -> int:
        """Return the bytes of all variables that were moved to a device."""
        return sum(
            byte_size(variable.shape, variable.dtype) or 0
            for variable in self._before
            if same_device(variable._value.device, device)
        )

    def give_back(self, variable: keras.Variable) -> bool:
        """Restore the original ``tf.Variable``, with the current value."""
        if variable not in self._before:
            return False
        before, home = self._before[variable]
        if before is not variable._value:
            overwrite(before, variable._value.read_value())
        variable._value = variables_lib.moved(before, home)
        del self._before[variable]
        return True

    def give_all_back(self) -> None:
        """Restore every variable that is still moved, whatever fails."""
        with contextlib.ExitStack() as stack:
            for variable in self._before:
                stack.callback(self.give_back, variable)


def overwrite(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign a value of any shape."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
