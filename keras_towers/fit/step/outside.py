"""The variables that a step uses although its model does not have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.step.step_agreement import are_equal
from keras_towers.fit.step.trace import Trace
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.tower_variables import (
    copy_first,
    copy_on_tower,
    read_handle,
)
from keras_towers.transport import Transport, next_key


def outside_variables(traced: Trace, model: keras.Model) -> list[Any]:
    """Return the handles of numeric variables that a step uses besides.

    Such as a ``tf.Variable``, or the weights of another model, that no layer of
    the model has. A variable that only a summary shows is not among them.
    """
    own = state_lib.collect(model).everything()
    known = {id(_handle_of(variable)) for variable in own}
    used = [t for _, t in traced.needed_captures if t.dtype == tf.resource]
    for call in traced.updates.values():
        for part in state_lib.optimizers_in(call.optimizer):
            used += map(_handle_of, part.variables)
    outside = {id(handle): handle for handle in used if id(handle) not in known}
    return list(filter(_is_numeric, outside.values()))


def _handle_of(variable: keras.Variable) -> Any:
    # A value that is on another rank has no handle here.
    return getattr(copy_on_tower(variable._value, 0), "handle", None)


def _is_numeric(handle: Any) -> bool:
    dtype = compat.type_of_variable(handle)
    return dtype is not None and tf.as_dtype(dtype) not in (
        tf.string,
        tf.resource,
        tf.variant,
    )


class OutsideVariables:
    """Gives all ranks rank 0's values of these variables.

    Only the trace of a step shows them, so ranks compare them in the first step
    of an epoch, and send them if they differ.
    """

    def __init__(self, transport: Transport, devices: Sequence[str]):
        self._transport = transport
        self._devices = devices
        self._due = compat.hidden_variable(False)

    def compare_in_next_step(self) -> None:
        """Compare the variables that the next step uses."""
        self._due.assign(True)

    def take_over(self, variables: Sequence[Sequence[Any]]) -> None:
        """Assign rank 0's values to variables, unless they are the same.

        Args:
            variables: of each variable, the handles of its copies on K towers,
                or its only handle.
        """

        def compare() -> tf.Tensor:
            values = [read_handle(handles[0]) for handles in variables]
            equal = are_equal(
                self._transport, _digest(values), [], next_key("gradients")
            )
            tf.cond(
                tf.reduce_all(equal.exact),
                lambda: False,
                lambda: self._send(values, variables),
            )
            return tf.identity(self._due.assign(False))

        tf.cond(self._due, compare, lambda: False)

    def _send(
        self, values: Sequence[tf.Tensor], variables: Sequence[Sequence[Any]]
    ) -> bool:
        key = next_key("broadcast")
        received = self._transport.broadcast(values, key)
        for handles, value in zip(variables, received, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handles[0], value=value)
            copy_first(handles, self._devices[: len(handles)])
        return True


def _digest(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a digest of values: two 32-bit numbers."""
    rows = [tf.fingerprint(tf.reshape(value, [1, -1])) for value in values]
    digest = tf.reshape(tf.fingerprint(tf.concat(rows, 1)), [2, 4])
    return tf.cast(tf.bitcast(digest, tf.uint32), tf.int64)


def describe(handles: Sequence[Any]) -> list[str]:
    """Describe variables, given their handles."""
    found = [
        compat.get_resource_handle_data(handle).shape_and_type[0]
        for handle in handles
    ]
    return [
        f"a variable outside of the model {tf.TensorShape(f.shape)} "
        f"{tf.as_dtype(f.dtype).name}"
        for f in found
    ]
