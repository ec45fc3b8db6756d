"""Whether a value in a tower's step depends on others, such as its examples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat


class Origins:
    """Searches the graph of a tower's step for the data behind a value."""

    def __init__(self, data: Any = None):
        # Without ``data``, any input of the graph but constants and variables.
        self._data = None if data is None else _operations(data)
        # What all towers have in common; its own origins do not matter.
        self._common: set[Any] = set()

    def note_common(self, values: Any) -> None:
        """Record values that are the same on all towers."""
        self._common |= _operations(values)

    def depends_on_data(self, value: Any) -> bool:
        """Whether a tensor is computed from the data."""
        # What is read from a variable is not; neither is anything that cannot
        # be seen, in eager mode or inside of nested functions.
        if not isinstance(value, tf.Tensor) or tf.executing_eagerly():
            return False
        graph = compat.get_default_graph()
        waiting = [] if value.graph is not graph else [value.op]
        seen: set[Any] = set()
        while waiting:
            operation = waiting.pop()
            if operation in seen or operation in self._common:
                continue
            if self._is_data(operation):
                return True
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
        return False

    def _is_data(self, operation: Any) -> bool:
        if self._data is not None:
            return operation in self._data
        if operation.inputs or operation.type in ("Const", "VarHandleOp"):
            return False
        return any(t.dtype != tf.resource for t in operation.outputs)


def _operations(values: Any) -> set[Any]:
    return {
        tensor.op
        for tensor in tf.nest.flatten(values, expand_composites=True)
        if isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph")
    }
