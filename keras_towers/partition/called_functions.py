"""Functions that towers call: branches, and the bodies of loops.

What they use of the program around them, they are given. Towers cannot meet
inside of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import Output
from keras_towers.partition.layouts import (
    REPLICATED,
    Layout,
    ListOf,
    NotDivided,
    Partial,
    Sharded,
    Value,
    Values,
    require,
)
from keras_towers.partition.list_elements import in_common, list_on_tower
from keras_towers.partition.program import Function, Operation, Tensor
from keras_towers.partition.registry import Node

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner


# Loops and branches of TensorFlow 1: an operation of theirs may have no result,
# and loops are circles of the graph.
_CONTROL_FLOW_V1 = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "Ref")
    for name in ("Enter", "Exit", "Merge", "NextIteration", "Switch")
)


# ---- of the trace ------------------------------------------------------------


def has_control_flow_v1(graph: Any) -> bool:
    """Whether a graph has loops or branches of TensorFlow 1.

    They can be done as a whole only, with the graph.
    """
    return any(o.type in _CONTROL_FLOW_V1 for o in graph.get_operations())


def graph_of(node: Node, name: str, ahead: int = 0) -> Any:
    """Return the graph of a function that an operation calls.

    Args:
        node: the operation.
        name: the name of the function.
        ahead: how many inputs of the operation are not those of the function.

    Raises:
        NotDivided: if it is not known, takes something else, or cannot be laid
            out.
    """
    graph = compat.graph_of_function(node.operation.graph, name)
    require(graph is not None)
    require(len(graph.inputs) == len(node.operation.inputs) - ahead)
    require(not has_control_flow_v1(graph))
    return graph


def source(tensor: Any) -> Any:
    """Return the tensor of which another is a copy."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


# ---- values ------------------------------------------------------------------


def value_in_function(partition: Partitioner, value: Value) -> Value:
    """Return a value of the program as functions see it."""
    if not value.is_replicated:
        return dataclasses.replace(value, whole_from=None)
    return dataclasses.replace(
        value,
        layout=REPLICATED,
        local=None,
        whole=partition.replicated(value),
        whole_from=None,
    )


def tensor_with_layout(
    partition: Partitioner, value: Value, layout: Layout
) -> Tensor:
    """Return what each tower has of a value, in a layout.

    Args:
        partition: makes the operations.
        value: the value.
        layout: how it is to be laid out.

    Raises:
        NotDivided: if a tower cannot have it without an exchange.
    """
    if isinstance(layout, ListOf):
        return list_on_tower(partition, value, layout)
    require(value.is_replicated or value.layout == layout)
    if isinstance(layout, Sharded):
        return partition.rows(value, layout)
    if isinstance(layout, Partial):
        return partition.partial(value)
    return partition.replicated(value)


def joined(a: Value, b: Value) -> Value:
    """Return how a value is laid out that is one of two, and what is known.

    Raises:
        NotDivided: if they cannot be laid out alike.
    """
    layouts = [v.layout for v in (a, b) if not v.is_replicated]
    require(all(layout == layouts[0] for layout in layouts))
    return in_common(a, b, layouts[0] if layouts else REPLICATED)


def with_parts_or_sums(
    partition: Partitioner, inputs: Values, lay_out: Callable[[Values], Values]
) -> Values:
    """Lay out what towers call.

    What is a part of a sum stays so, or else is summed before.

    Args:
        partition: has the program around it.
        inputs: what it is given.
        lay_out: lays it out.

    Raises:
        NotDivided: if it has to be computed once.
    """
    before = len(partition.once)
    while True:
        try:
            return lay_out(inputs)
        except NotDivided:
            del partition.once[before:]
        parts = [value for value in inputs if value.is_partial]
        require(parts)
        for value in parts:
            partition.whole(value)


# ---- calls -------------------------------------------------------------------


def closed(
    functions: Sequence[Function],
) -> tuple[list[Function], list[Tensor]]:
    """Return functions that are given what they use of the program around.

    Args:
        functions: N functions, with all operations that may be needed.

    Returns:
        The N functions, and what all of them take behind their own inputs.
    """
    captured = [_captured(function) for function in functions]
    captures = list(dict.fromkeys(t for _, others in captured for t in others))
    closures = [
        Function([*function.inputs, *captures], function.outputs, operations)
        for function, (operations, _) in zip(functions, captured, strict=True)
    ]
    return closures, captures


def _captured(function: Function) -> tuple[list[Operation], list[Tensor]]:
    """The operations that a function needs, and what it uses else."""
    inside = {id(operation) for operation in function.operations}
    seen, waiting = set(function.inputs), list(function.outputs)
    kept: set[int] = set()
    others: list[Tensor] = []
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        operation = tensor.operation
        if operation is not None and (
            id(operation) in inside or _is_made_anew(operation)
        ):
            kept.add(id(operation))
            waiting += operation.inputs
        else:
            others.append(tensor)
    return [o for o in function.operations if id(o) in kept], others


def _is_made_anew(operation: Operation) -> bool:
    """Whether a function makes it anew, from what it is given.

    Numbers that are no constants are given: they follow from large tensors, and
    tell nothing of shapes.
    """
    is_number = operation.outputs[0].shape.rank == 0
    return operation.is_repeated and (
        operation.type == "Const" or not is_number
    )


def looped(
    node: Node,
    carried: Sequence[Tensor],
    body: Function,
    condition: Function,
) -> list[Tensor]:
    """Add a loop; return its outputs, first what goes round.

    Args:
        partition: has the program.
        node: the operation of the trace.
        carried: N tensors that go round.
        body: takes them, and returns them anew.
        condition: takes them, and returns whether there is another round.
    """
    (round_, goes_on), captures = closed([body, condition])
    round_ = dataclasses.replace(round_, outputs=[*round_.outputs, *captures])
    operands = [*carried, *captures]
    return called(
        node,
        operands,
        {"T": [tensor.dtype for tensor in operands]},
        [(tensor.dtype, tensor.shape) for tensor in round_.inputs],
        {"body": round_, "cond": goes_on},
    )


def called(
    node: Node,
    inputs: Sequence[Tensor],
    attributes: Mapping[str, Any],
    outputs: Sequence[Output],
    functions: Mapping[str, Any],
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
    partition = node.partition
    same = ("parallel_iterations", "_lower_using_switch_merge")
    traced = node.operation.node_def.attr
    # The functions read variables, and do not write any.
    reads = any(tensor.dtype == tf.resource for tensor in inputs)
    least = partition.order.use(node, inputs, True) if reads else 0
    return partition.add(
        node.type,
        inputs,
        {
            **attributes,
            **{key: traced[key] for key in same if key in traced},
            "output_shapes": [shape for _, shape in outputs],
        },
        outputs,
        least=least,
        functions=functions,
        source=node.operation,
    )
