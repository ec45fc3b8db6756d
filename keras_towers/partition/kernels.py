"""The operations that XLA compiles, by the kernels registered in TensorFlow.

``xla_pieces.py`` leaves the others out of compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.effects import called_names
from keras_towers.partition.program import Attributes, Function, Operation


class Kernels:
    """The operations that XLA compiles on a device.

    Args:
        device: the device.
        graphs: the graphs whose functions operations call by their names.
    """

    def __init__(self, device: str, graphs: Sequence[tf.Graph] = ()):
        kind = tf.DeviceSpec.from_string(device).device_type or "CPU"
        self._device_type: str = kind.upper()
        self._graphs = graphs
        self._of_names: dict[str, bool] = {}

    def has(self, operation: Operation) -> bool:
        """Whether XLA compiles an operation, with all functions it calls."""
        named = operation.functions
        attributes = {
            key: value
            for key, value in operation.attributes.items()
            if key not in named
        }
        inside = (o for f in functions_of(operation) for o in f.operations)
        return self.has_node(operation.type, attributes) and all(
            map(self.has, inside)
        )

    def has_node(self, type_: str, attributes: Attributes) -> bool:
        """Whether XLA compiles a node, with all functions it calls by name.

        Args:
            type_: the type of the operation.
            attributes: its attributes, as ``AttrValue``.
        """
        if compat.op_definition(type_) is None:
            # The type of a legacy call is the name of the function.
            return self._has_function(type_)
        kernels = compat.xla_kernels(type_, self._device_type)
        return any(
            all(
                _dtypes(attributes.get(name)) <= allowed
                for name, allowed in kernel.items()
            )
            for kernel in kernels
        ) and all(map(self._has_function, called_names(attributes)))

    def _has_function(self, name: str) -> bool:
        if name not in self._of_names:
            # It may call itself.
            self._of_names[name] = True
            self._of_names[name] = self._compiles(name)
        return self._of_names[name]

    def _compiles(self, name: str) -> bool:
        function = compat.definition_of_function(self._graphs, name)
        if function is None:
            return False
        return all(self.has_node(n.op, n.attr) for n in function.node_def)


def functions_of(operation: Operation) -> list[Function]:
    """Return the functions of a program that an operation calls."""
    functions: list[Function] = []
    for value in operation.functions.values():
        functions += value if isinstance(value, Sequence) else [value]
    return functions


def rename_calls(attributes: Attributes, rename: Callable[[str], str]) -> None:
    """Let a node call functions by other names."""
    for value in attributes.values():
        if value.HasField("func"):
            value.func.name = rename(value.func.name)
        for function in value.list.func:
            function.name = rename(function.name)


def _dtypes(value: Any) -> set[int]:
    """Return the dtypes in an attribute; none if it is missing."""
    if value is None:
        return set()
    return {*value.list.type, value.type} - {0}
