"""The functions that operations call: a program's own, or traced ones by name.

A traced function is read as one of a program, so that who looks into functions
needs to know one form of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.axes import ONCE
from keras_towers.partition.ir.effects import called_names
from keras_towers.partition.ir.program import Function, Operation, Tensor


class CalledFunctions:
    """Finds the functions that operations call; reads each traced one once.

    Args:
        graphs: the graphs whose functions operations call by their names.
    """

    def __init__(self, graphs: Sequence[tf.Graph] = ()):
        self._graphs = [*graphs]
        self._read: dict[str, Function | None] = {}

    def of(self, operation: Operation) -> list[Function | None]:
        """Return the functions that an operation calls; None: unknown."""
        attributes = {
            key: value
            for key, value in operation.attributes.items()
            if key not in operation.functions
        }
        names = called_names(attributes)
        if compat.op_definition(operation.type) is None:
            # The type of a legacy call is the name of the function.
            names.append(operation.type)
        return [*functions_of(operation), *map(self._named, names)]

    def _named(self, name: str) -> Function | None:
        if name not in self._read:
            found = (compat.graph_of_function(g, name) for g in self._graphs)
            graph = next((graph for graph in found if graph is not None), None)
            self._read[name] = None
            if graph is not None:
                # It may call functions of its own.
                self._graphs.append(graph)
                self._read[name] = _function_of(graph)
        return self._read[name]


def _function_of(graph: Any) -> Function:
    """Return the function of a program that is like a traced one."""
    tensors = {t.name: Tensor(t.dtype, t.shape) for t in graph.inputs}
    inputs = list(tensors.values())
    traced = [
        operation
        for operation in graph.get_operations()
        if all(tensor.name not in tensors for tensor in operation.outputs)
    ]
    # In the bodies of some loops operations are in another order.
    inputs_of: list[list[Tensor]] = [[] for _ in traced]
    operations: list[Operation] = []
    for operation, used in zip(traced, inputs_of, strict=True):
        attributes = operation.node_def.attr
        own = Operation(operation.type, used, attributes, [], ONCE)
        for index, t in enumerate(operation.outputs):
            made = Tensor(t.dtype, t.shape, operation=own, index=index)
            tensors[t.name] = made
            own.outputs.append(made)
        operations.append(own)
    for operation, used in zip(traced, inputs_of, strict=True):
        used += [tensors[tensor.name] for tensor in operation.inputs]
    outputs = [tensors[tensor.name] for tensor in graph.outputs]
    return Function(inputs, outputs, operations)


def functions_of(operation: Operation) -> list[Function]:
    """Return the functions of a program that an operation calls."""
    functions: list[Function] = []
    for value in operation.functions.values():
        functions += value if isinstance(value, Sequence) else [value]
    return functions
