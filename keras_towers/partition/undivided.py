"""Computes what is not divided as one device does, and shares the result.

``fit/step/step_costs.py`` tells users which lines of their code that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.conversions import Converter
from keras_towers.partition.effects import (
    Effect,
    called_graphs,
    effect_of,
    is_draw,
    written,
)
from keras_towers.partition.folding import LARGEST
from keras_towers.partition.layouts import (
    REPLICATED,
    NotDivided,
    Value,
    Values,
    require,
    sizes_of,
    unless_none,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node
from keras_towers.partition.resources import type_of_content

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner

# Types of loops, which return the handles that they take.
LOOPS = ("While", "StatelessWhile")


def compute_once(node: Node, inputs: Values) -> Values:
    """Compute an operation as one device does, and share the result."""
    partitioner = node.partitioner
    calls = _uses_handles(node) and called_graphs(node.operation)
    if calls and partitioner.options.xla and partitioner.can_exchange:
        before = len(partitioner.computed_once)
        try:
            return _call_with_wholes(node, inputs)
        except NotDivided:
            del partitioner.computed_once[before:]
    in_shards = [v for v in inputs if partitioner.rows_of(v) is not None]
    if not in_shards:
        return _compute_whole(node, inputs)
    # Functions get what variables hold, not their handles.
    require(partitioner.can_exchange)
    wholes = {id(v): _whole_of(partitioner, v) for v in in_shards}
    outputs = list(_compute_whole(node, [wholes.get(id(v), v) for v in inputs]))
    if node.type in LOOPS:
        # They return the handles that they take.
        for index, variable in enumerate(inputs):
            if id(variable) in wholes:
                outputs[index] = variable
    for index in written(node.operation):
        variable = inputs[index]
        if id(variable) in wholes:
            whole = partitioner.read(unless_none(wholes[id(variable)].whole))
            sizes = sizes_of(whole.shape)
            partitioner.assign(variable, Value(REPLICATED, None, whole, sizes))
    return outputs


def _call_with_wholes(node: Node, inputs: Values) -> Values:
    """Let all towers call a function with what one device has.

    XLA compiles what gets the values of variables, and not their handles.

    Raises:
        NotDivided: the function has other effects than to write variables.
    """
    partitioner = node.partitioner
    if any(not v.is_replicated for v in inputs):
        partitioner.computed_once.append(node.operation)
    wholes = [
        value
        if value.is_replicated
        else Value(
            REPLICATED,
            whole=partitioner.assemble(value),
            shape=value.shape,
            known=value.known,
        )
        for value in inputs
    ]
    return partitioner.apply_to_wholes(node, wholes)


def _whole_of(partitioner: Partitioner, variable: Value) -> Value:
    """Return a variable with the whole of one in shards, for one operation."""
    common = unless_none(variable.whole)
    dtype, shape = type_of_content(common)
    # It exists as long as its handle, as variables do eagerly.
    attributes = {
        "dtype": dtype,
        "shape": shape,
        "shared_name": compat.anonymous_name(),
    }
    (handle,) = partitioner.add(
        "VarHandleOp", [], attributes, [(tf.resource, tf.TensorShape(()))]
    )
    handle.handle = common.handle
    whole = partitioner.assemble(partitioner.content_of(variable))
    partitioner.add_in_order(
        "AssignVariableOp",
        [handle, whole],
        {"dtype": dtype, "validate_shape": False},
        reads=False,
    )
    return dataclasses.replace(variable, whole=handle)


def _compute_whole(node: Node, inputs: Values) -> Values:
    """Compute an operation as one device does, with whole variables."""
    partitioner = node.partitioner
    if any(not v.is_replicated and not v.is_partial for v in inputs):
        partitioner.computed_once.append(node.operation)
    effect = effect_of(node.operation)
    if effect:
        return _add_effect(node, inputs, effect)
    # Functions get what variables hold, not their handles.
    require(partitioner.can_exchange or not _uses_handles(node))
    if not _should_run_on_towers(node, inputs):
        operands = [partitioner.assemble(value) for value in inputs]
        outputs = _copy_in_order(
            node, operands, repeats=_is_constant(node, inputs)
        )
        return [Value(REPLICATED, whole=tensor) for tensor in outputs]
    local_operands = [partitioner.replicate(value) for value in inputs]
    whole_operands = [
        value.whole for value in inputs if value.whole is not None
    ]
    whole_is_ready = len(whole_operands) == len(local_operands)
    results = [
        Value(REPLICATED, t) for t in _copy_in_order(node, local_operands)
    ]
    if whole_is_ready:
        # Operations that are computed once may use it, too.
        outputs = _copy_in_order(node, whole_operands)
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
    is_write = bool(variables) and not node.num_outputs
    if effect is Effect.PER_PROCESS and is_write and mirrored == variables:
        # Each tower writes to its copies.
        local_operands = [partitioner.replicate(value) for value in inputs]
        outputs = _copy_in_order(node, local_operands, reads=False)
        return [Value(REPLICATED, local) for local in outputs]
    at_root = partitioner.options.ranks and effect is Effect.EXTERNAL
    whole_operands = [partitioner.assemble(value) for value in inputs]
    results = _copy_in_order(node, whole_operands, reads=False, at_root=at_root)
    if at_root:
        results = [
            _broadcast_from_root(partitioner, whole) for whole in results
        ]
    if effect is Effect.EXTERNAL:
        # A function of Python may write any variable.
        partitioner.resources.contents.clear()
    for index in variables if at_root else mirrored:
        _share_content(partitioner, inputs[index], at_root)
    return [Value(REPLICATED, whole=whole) for whole in results]


def _copy_in_order(
    node: Node,
    operands: Sequence[Tensor],
    reads: bool = True,
    at_root: bool = False,
    repeats: bool = False,
) -> list[Tensor]:
    """Add an operation after earlier users of the same resources."""
    partitioner = node.partitioner
    least = 0
    if node.operation.op_def.is_stateful or _uses_handles(node):
        least = partitioner.resources.record_use(node.type, operands, reads)
    return node.copy(
        operands,
        least=least,
        has_effect=not reads,
        at_root=at_root,
        is_repeated=repeats,
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


def _share_content(
    partitioner: Partitioner, variable: Value, at_root: bool
) -> None:
    """Give all towers what a variable holds after it was written once.

    Args:
        partitioner: the partitioner of the step.
        variable: the handle.
        at_root: whether only the first process has written it.
    """
    written_once = Value(REPLICATED, whole=partitioner.assemble(variable))
    content = partitioner.content_of(written_once)
    whole = partitioner.assemble(content)
    if at_root:
        whole = partitioner.exchange("root", whole)
    # Its copies are not written yet.
    partitioner.assign(variable, Value(REPLICATED, whole=whole))


def _should_run_on_towers(node: Node, inputs: Values) -> bool:
    """Whether towers compute an operation on replicated values themselves.

    Small values are cheaper to recompute than to exchange, and towers have
    what their own copies of variables hold.
    """
    if _uses_handles(node) or not all(v.is_replicated for v in inputs):
        return False
    shapes = [tensor.shape for tensor in node.operation.inputs]
    at_towers = [_is_on_every_tower(value) for value in inputs]
    operands = list(zip(inputs, shapes, at_towers, strict=True))
    if all(map(_is_small, node.shapes)) and any(
        value.whole is None for value, _, is_there in operands if is_there
    ):
        return True
    # An input that is also computed once costs nothing either way.
    has_much = any(
        value.whole is not None or not _is_small(shape)
        for value, shape, is_there in operands
        if is_there
    )
    lacks_little = all(
        is_there or _is_small(shape) or _is_repeated(value)
        for value, shape, is_there in operands
    )
    return has_much and lacks_little


def _uses_handles(node: Node) -> bool:
    return any(t.dtype == tf.resource for t in node.operation.inputs)


def _is_small(shape: tf.TensorShape) -> bool:
    """Whether a tensor is too small to be worth an exchange."""
    size = shape.num_elements()
    return size is not None and size <= LARGEST


def _is_on_every_tower(value: Value) -> bool:
    """Whether every tower has the whole value, without an exchange."""
    return value.layout == REPLICATED and value.local is not None


def _is_constant(node: Node, inputs: Values) -> bool:
    """Whether an operation gives small constants, which need no exchange.

    Draws are not: XLA may compile only some of the repetitions.
    """
    return (
        all(map(_is_repeated, inputs))
        and all(map(_is_small, node.shapes))
        and not node.operation.op_def.is_stateful
        and not is_draw(node.type)
        and not called_graphs(node.operation)
    )


def _is_repeated(value: Value) -> bool:
    """Whether every function that uses a value computes it again."""
    operation = None if value.whole is None else value.whole.operation
    return operation is not None and operation.is_repeated
