"""Functions that towers call: branches, and the bodies of loops.

What they use of the program around them, they are given. Towers cannot meet
inside of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import AttrValue, Builder, NeedsExchange
from keras_towers.partition.layouts import (
    REPLICATED,
    Layout,
    ListOf,
    Partial,
    Sharded,
    Value,
)
from keras_towers.partition.lists import (
    alike_elements,
    alike_entries,
    joined_elements,
    joined_entries,
    joined_shapes,
    own_list,
)
from keras_towers.partition.node import Node
from keras_towers.partition.program import Operation, Tensor

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner


def graph_of(node: Node, name: str, ahead: int = 0) -> Any:
    """Return the graph of a function that an operation calls.

    It is None if it is not known, or takes something else.

    Args:
        node: the operation.
        name: the name of the function.
        ahead: how many inputs of the operation are not those of the function.
    """
    graph = compat.graph_of_function(node.operation.graph, name)
    if graph is None or len(graph.inputs) != node.num_inputs - ahead:
        return None
    return graph


def source(tensor: Any) -> Any:
    """Return the tensor of which another is a copy."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def inside(partition: Partitioner, value: Value) -> Value:
    """Return a value of the program as functions see it."""
    if not value.is_replicated:
        return dataclasses.replace(value, linear=None)
    return dataclasses.replace(
        value,
        layout=REPLICATED,
        local=None,
        whole=partition.local(value),
        linear=None,
    )


def summed(partition: Partitioner, value: Value) -> Value:
    """Return a value, if it is a part of a sum the sum."""
    if value.is_partial:
        partition.whole(value)
    return value


def laid_out(partition: Partitioner, value: Value, layout: Layout) -> Tensor:
    """Return what each tower has of a value, in a layout.

    Args:
        partition: makes the operations.
        value: the value.
        layout: how it is to be laid out.

    Raises:
        NeedsExchange: if a tower cannot have it of itself.
    """
    found: Tensor | None = None
    if isinstance(layout, Sharded):
        if value.is_replicated or value.layout == layout:
            found = partition.rows(value, layout)
    elif isinstance(layout, ListOf):
        found = own_list(partition, value, layout)
    elif value.is_replicated:
        split = isinstance(layout, Partial)
        found = partition.partial(value) if split else partition.local(value)
    elif value.is_partial and isinstance(layout, Partial):
        found = partition.partial(value)
    if found is None:
        raise NeedsExchange
    return found


def joined(a: Value, b: Value) -> Value:
    """Return how a value is laid out that is one of two, and what is known.

    Raises:
        NeedsExchange: if they cannot be laid out alike.
    """
    layouts = [REPLICATED if v.is_replicated else v.layout for v in (a, b)]
    divided = [layout for layout in layouts if layout != REPLICATED]
    if any(layout != divided[0] for layout in divided):
        raise NeedsExchange
    return Value(
        divided[0] if divided else REPLICATED,
        shape=joined_shapes(a.shape, b.shape),
        known=joined_entries(a.known, b.known),
        element=joined_elements(a.element, b.element),
    )


def alike(a: Value, b: Value) -> bool:
    """Whether two values are laid out alike, and as much is known of them."""
    return (
        (a.layout, a.shape) == (b.layout, b.shape)
        and alike_entries(a.known, b.known)
        and alike_elements(a.element, b.element)
    )


def captured(
    builder: Builder, inputs: Iterable[Tensor], outputs: Iterable[Tensor]
) -> tuple[list[Operation], list[Tensor]]:
    """Return the operations that a function needs, and what it is given else.

    Args:
        builder: has its operations.
        inputs: its inputs.
        outputs: its outputs.
    """
    own = {id(operation) for operation in builder.operations}
    seen, waiting = set(inputs), list(outputs)
    kept: set[int] = set()
    others: list[Tensor] = []
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        operation = tensor.operation
        if operation is not None and (
            id(operation) in own or _is_made_anew(operation)
        ):
            kept.add(id(operation))
            waiting += operation.inputs
        else:
            others.append(tensor)
    return [o for o in builder.operations if id(o) in kept], others


def _is_made_anew(operation: Operation) -> bool:
    """Whether a function makes it anew, from what it is given.

    Numbers that are no constants are given: they follow from large tensors, and
    tell nothing of shapes.
    """
    is_number = operation.outputs[0].shape.rank == 0
    return operation.is_repeated and (
        operation.type == "Const" or not is_number
    )


def called(
    partition: Partitioner,
    node: Node,
    inputs: Sequence[Tensor],
    attributes: dict[str, Any],
    outputs: Sequence[tuple[Any, tf.TensorShape]],
    functions: dict[str, Any],
) -> list[Tensor]:
    """Add an operation that calls functions; return its outputs.

    Args:
        partition: has the program.
        node: the operation of the trace.
        inputs: its inputs.
        attributes: those that name dtypes.
        outputs: dtypes and shapes of its outputs.
        functions: what it calls, by its attributes.
    """
    same = ("parallel_iterations", "_lower_using_switch_merge")
    given = node.operation.node_def.attr
    attributes |= {key: given[key] for key in same if key in given}
    shapes = [shape.as_proto() for _, shape in outputs]
    attributes["output_shapes"] = AttrValue(
        list=AttrValue.ListValue(shape=shapes)
    )
    # The functions read variables, and do not write any.
    handles = [tensor for tensor in inputs if tensor.dtype == tf.resource]
    least = partition.after(node, handles, True) if handles else 0
    found = partition.builder.add(
        node.type,
        inputs,
        attributes,
        outputs,
        least=least,
        functions=functions,
        source=node.operation,
    )
    if handles:
        # What is computed once comes first in a level.
        level = max([least, *(tensor.level for tensor in inputs)])
        partition.note_use(node, handles, True, level + 1)
    return found


def dtypes_of(tensors: Iterable[Any]) -> Any:
    """Return the dtypes of tensors, as an attribute."""
    found = [tf.as_dtype(tensor.dtype).as_datatype_enum for tensor in tensors]
    return AttrValue(list=AttrValue.ListValue(type=found))
