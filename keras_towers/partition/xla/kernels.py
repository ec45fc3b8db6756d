"""The operations that XLA compiles, by the kernels registered in TensorFlow.

``xla_pieces.py`` leaves the others out of compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.called_functions import CalledFunctions
from keras_towers.partition.ir.program import Attributes, Function, Operation


class Kernels:
    """The operations that XLA compiles on a device.

    Args:
        device: the device.
        called: finds the functions that operations call.
    """

    def __init__(self, device: str, called: CalledFunctions):
        kind = tf.DeviceSpec.from_string(device).device_type or "CPU"
        self._device_type: str = kind.upper()
        self._called = called
        self._compiled: dict[Function, bool] = {}

    def has(self, operation: Operation) -> bool:
        """Whether XLA compiles an operation, with all functions it calls."""
        type_, attributes = operation.type, operation.attributes
        is_call = compat.op_definition(type_) is None
        return (is_call or self.has_kernel(type_, attributes)) and all(
            map(self._compiles, self._called.of(operation))
        )

    def has_kernel(self, type_: str, attributes: Attributes) -> bool:
        """Whether XLA has a kernel for a node.

        Args:
            type_: the type of the operation.
            attributes: its attributes, as ``AttrValue``.
        """
        kernels = compat.xla_kernels(type_, self._device_type)
        return any(
            all(
                _dtypes(attributes.get(name)) <= allowed
                for name, allowed in kernel.items()
            )
            for kernel in kernels
        )

    def _compiles(self, function: Function | None) -> bool:
        if function is None:
            return False
        if function not in self._compiled:
            # It may call itself.
            self._compiled[function] = True
            has_all = all(map(self.has, function.operations))
            self._compiled[function] = has_all
        return self._compiled[function]


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
