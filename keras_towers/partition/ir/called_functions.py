"""The functions that operations call: a program's own, or traced ones by name.

A traced function is read as one of a program, so that who looks into functions
needs to know one form of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.axes import ONCE
from keras_towers.partition.ir.builder import UNKNOWN_SHAPE
from keras_towers.partition.ir.effects import called_names
from keras_towers.partition.ir.program import Function, Operation, Tensor

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef


class CalledFunctions:
    """Finds the functions that operations call; reads each traced one once.

    Args:
        graphs: the graphs whose functions operations call by their names.
    """

    def __init__(self, graphs: Sequence[tf.Graph] = ()):
        self._graphs = graphs
        self._read: dict[str, Function | None] = {}

    def of(self, operation: Operation) -> list[Function | None]:
        """Return the functions that an operation calls; None: an unknown one.

        Traced ones have only shapes of unknown rank.
        """
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
            definition = compat.definition_of_function(self._graphs, name)
            self._read[name] = definition and self._function(definition)
        return self._read[name]

    def _function(self, definition: FunctionDef) -> Function:
        inputs = [_tensor(arg.type) for arg in definition.signature.input_arg]
        names = [arg.name for arg in definition.signature.input_arg]
        tensors = dict(zip(names, inputs, strict=True))
        operations: list[Operation] = []
        # In the bodies of some loops nodes are in another order.
        inputs_of: list[list[Tensor]] = [[] for _ in definition.node_def]
        for node, own in zip(definition.node_def, inputs_of, strict=True):
            operation = Operation(node.op, own, node.attr, [], ONCE)
            for name, dtype in self._outputs_of(node):
                index = len(operation.outputs)
                tensors[name] = _tensor(dtype, operation, index)
                operation.outputs.append(tensors[name])
            operations.append(operation)
        for node, own in zip(definition.node_def, inputs_of, strict=True):
            own += [tensors[name] for name in node.input if name[0] != "^"]
        outputs = [
            tensors[definition.ret[arg.name]]
            for arg in definition.signature.output_arg
        ]
        return Function(inputs, outputs, operations)

    def _outputs_of(self, node: NodeDef) -> Iterator[tuple[str, int]]:
        """Yield the name and the number of the dtype of each output."""
        signature = compat.op_definition(node.op)
        if signature is None:
            called = compat.definition_of_function(self._graphs, node.op)
            signature = called and called.signature
        for arg in signature.output_arg if signature else ():
            dtypes = [arg.type or node.attr[arg.type_attr].type]
            if arg.type_list_attr:
                dtypes = node.attr[arg.type_list_attr].list.type
            elif arg.number_attr:
                dtypes *= node.attr[arg.number_attr].i
            for number, dtype in enumerate(dtypes):
                yield f"{node.name}:{arg.name}:{number}", dtype


def functions_of(operation: Operation) -> list[Function]:
    """Return the functions of a program that an operation calls."""
    functions: list[Function] = []
    for value in operation.functions.values():
        functions += value if isinstance(value, Sequence) else [value]
    return functions


def _tensor(
    dtype: int, operation: Operation | None = None, index: int = 0
) -> Tensor:
    kind = tf.as_dtype(dtype)
    return Tensor(kind, UNKNOWN_SHAPE, operation=operation, index=index)
