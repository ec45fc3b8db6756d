"""Operations that are computed once, as on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.builder import Builder
from keras_towers.partition.conversions import Converter, is_small
from keras_towers.partition.effects import (
    Effect,
    called_graphs,
    effect_of,
    tower_phase,
    written,
)
from keras_towers.partition.layouts import REPLICATED, Value, Values, require
from keras_towers.partition.program import Function, Tensor
from keras_towers.partition.registry import Node

# Given the same seed, XLA draws different numbers from TensorFlow's kernels.
_DRAWN_BY_XLA = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
)


def compute_once(node: Node, inputs: Values) -> Values:
    """Compute an operation as one device does, and share the result."""
    partitioner = node.partitioner
    if any(not v.is_replicated and not v.is_partial for v in inputs):
        partitioner.once.append(node.operation)
    effect = effect_of(node.operation)
    if effect:
        return _add_effect(node, inputs, effect)
    if not _should_run_on_towers(node, inputs):
        operands = [partitioner.assemble(value) for value in inputs]
        outputs = _add_in_order(node, operands)
        return [Value(REPLICATED, whole=tensor) for tensor in outputs]
    order = partitioner.order
    local_operands = [partitioner.replicate(value) for value in inputs]
    whole_operands = [
        value.whole for value in inputs if value.whole is not None
    ]
    is_there = len(whole_operands) == len(local_operands) and (
        order.earliest_level(node, whole_operands, True)
        <= order.earliest_level(node, local_operands, True)
    )
    results = [
        Value(REPLICATED, t) for t in _add_in_order(node, local_operands)
    ]
    if is_there:
        # Operations that are computed once may use it, too.
        outputs = _add_in_order(node, whole_operands)
        for value, whole in zip(results, outputs, strict=True):
            value.whole = whole
    return results


def _add_effect(node: Node, inputs: Values, effect: Effect) -> Values:
    """Add an operation that has an effect, for all towers.

    Inside of a function nothing is done: the whole function is computed once.
    """
    partitioner = node.partitioner
    require(partitioner.can_exchange)
    variables = written(node.operation)
    mirrored = [k for k in variables if _is_on_every_tower(inputs[k])]
    if effect is Effect.PER_PROCESS and variables and mirrored == variables:
        # Each tower writes to its copies.
        local_operands = [partitioner.replicate(value) for value in inputs]
        outputs = _add_in_order(node, local_operands, reads=False)
        return [Value(REPLICATED, local) for local in outputs]
    at_root = partitioner.options.ranks and effect is Effect.EXTERNAL
    whole_operands = [partitioner.assemble(value) for value in inputs]
    results = _add_in_order(node, whole_operands, reads=False, at_root=at_root)
    if at_root:
        results = [
            _broadcast_from_root(partitioner, whole) for whole in results
        ]
    for index in variables if at_root else mirrored:
        _assign_everywhere(node, index, inputs[index], at_root)
    return [Value(REPLICATED, whole=whole) for whole in results]


def _add_in_order(
    node: Node,
    operands: Sequence[Tensor],
    reads: bool = True,
    at_root: bool = False,
) -> list[Tensor]:
    """Add an operation after earlier users of the same resources."""
    partitioner = node.partitioner
    least = partitioner.order.record_use(node, operands, reads)
    is_common = partitioner.can_exchange and not tower_phase(operands)
    if partitioner.options.xla and is_common and _draws_in_xla(node.operation):
        return _add_xla_function(node, operands, least)
    return node.copy(
        operands,
        least=least,
        has_effect=not reads,
        at_root=at_root,
    )


def _add_xla_function(
    node: Node, operands: Sequence[Tensor], least: int
) -> list[Tensor]:
    """Add an operation as a function that XLA compiles."""
    body = Builder(can_exchange=False)
    inputs = [
        Tensor(t.dtype, t.shape, t.on_towers, handle=t.handle) for t in operands
    ]
    outputs = body.copy(node.operation, inputs)
    return node.partitioner.add(
        "StatefulPartitionedCall",
        operands,
        {
            "Tin": [tensor.dtype for tensor in inputs],
            "Tout": [tensor.dtype for tensor in outputs],
            "_XlaMustCompile": True,
        },
        [(tensor.dtype, tensor.shape) for tensor in outputs],
        least=least,
        functions={"f": Function(inputs, outputs, body.operations)},
        source=node.operation,
    )


def _broadcast_from_root(partitioner: Converter, whole: Tensor) -> Tensor:
    """Return the result of the first process on all processes."""
    if whole.dtype == tf.resource:
        # Loops return the handles that they take.
        return whole
    if whole.dtype != tf.variant:
        return partitioner.exchange("root", whole)
    # Processes exchange a list of tensors as a string.
    text = partitioner.op("SerializeTensor", [whole], (), at_root=True)
    text = partitioner.exchange("root", text)
    return partitioner.op(
        "ParseTensor", [text], whole.shape, out_type=tf.variant
    )


def _assign_everywhere(
    node: Node,
    index: int,
    variable: Value,
    at_root: bool,
) -> None:
    """Assign the new value of a variable to all of its copies.

    Args:
        node: the operation that has written it.
        index: the index of the variable's handle among the inputs.
        variable: the value of the handle.
        at_root: whether only the first process has written it.
    """
    partitioner = node.partitioner
    order = partitioner.order
    handle = partitioner.assemble(variable)
    (spec,) = compat.get_resource_handle_data(
        node.operation.inputs[index]
    ).shape_and_type
    value = partitioner.read_variable(
        handle,
        tf.as_dtype(spec.dtype),
        tf.TensorShape(spec.shape),
        order.earliest_level(node, [handle], True),
    )
    if at_root:
        value = partitioner.exchange("root", value)
    operands = [partitioner.replicate(variable), value]
    partitioner.add(
        "AssignVariableOp",
        operands,
        {"dtype": value.dtype, "validate_shape": False},
        [],
        least=order.record_use(node, operands, False),
        has_effect=True,
    )


def _should_run_on_towers(node: Node, inputs: Values) -> bool:
    """Whether towers compute an operation on replicated values themselves.

    Small values are cheaper to recompute than to exchange, and towers have
    their own copies of mirrored variables.
    """
    if not all(value.is_replicated for value in inputs):
        return False
    pairs = list(zip(inputs, node.operation.inputs, strict=True))
    if any(
        t.dtype == tf.resource and not _is_on_every_tower(v) for v, t in pairs
    ):
        return False
    at_towers = [(v, t.shape) for v, t in pairs if _is_on_every_tower(v)]
    small = all(is_small(shape) for shape in node.shapes)
    if small and any(value.whole is None for value, _ in at_towers):
        return True
    return any(
        value.whole is not None or not is_small(shape)
        for value, shape in at_towers
    ) and all(
        _is_on_every_tower(v) or is_small(t.shape) or _is_repeated(v)
        for v, t in pairs
    )


def _is_on_every_tower(value: Value) -> bool:
    """Whether every tower has the whole value, without an exchange."""
    return value.layout == REPLICATED and value.local is not None


def _is_repeated(value: Value) -> bool:
    """Whether every function that uses a value computes it again."""
    operation = None if value.whole is None else value.whole.operation
    return operation is not None and operation.is_repeated


def _draws_in_xla(operation: Any) -> bool:
    """Whether an operation, or a function that it calls, draws in XLA."""
    return operation.type in _DRAWN_BY_XLA or any(
        _draws_in_xla(inner)
        for graph in called_graphs(operation)
        if graph is not None
        for inner in graph.get_operations()
    )
