"""Computes an operation once, as one device does, and shares the result.

``layout_pass.py`` does this if no rule divides the operation.
``step_costs.py`` tells users the lines of their code that cause it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.axes import AT_ROOT, ONCE, Axes
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.effects import (
    LOOPS,
    Effect,
    called_graphs,
    effect_of,
    is_draw,
    written,
)
from keras_towers.partition.ir.layouts import REPLICATED, sizes_of
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import asserted, require
from keras_towers.partition.ir.values import Value, Values
from keras_towers.partition.layout.folding import LARGEST
from keras_towers.partition.layout.nodes import Node


def compute_once(node: Node, inputs: Values) -> Values:
    """Compute an operation once, as one device does, and share the result."""
    variables = node.variables
    in_shards = [v for v in inputs if variables.rows_of(v) is not None]
    if not in_shards:
        return _compute_whole(node, inputs)
    # Functions get what variables hold, not their handles.
    require(node.builder.can_exchange)
    wholes = {id(v): _whole_of(node, v) for v in in_shards}
    outputs = list(_compute_whole(node, [wholes.get(id(v), v) for v in inputs]))
    if node.type in LOOPS:
        # They return the handles that they take.
        for index, variable in enumerate(inputs):
            if id(variable) in wholes:
                outputs[index] = variable
    for index in written(node.operation):
        variable = inputs[index]
        if id(variable) in wholes:
            whole = variables.read(asserted(wholes[id(variable)].whole))
            sizes = sizes_of(whole.shape)
            variables.assign(variable, Value(REPLICATED, None, whole, sizes))
    return outputs


def wholes_of(node: Node, inputs: Values) -> Values:
    """Return whole inputs, as on one device, for an operation on all towers."""
    if any(not v.is_replicated for v in inputs):
        node.scope.computed_once[node.operation] = node.reason
    return [
        value
        if value.is_replicated
        else Value(
            REPLICATED,
            whole=node.converter.assemble(value),
            shape=value.shape,
            known=value.known,
        )
        for value in inputs
    ]


def _whole_of(node: Node, variable: Value) -> Value:
    """Return a variable with a whole value, in place of one in shards.

    For one operation.
    """
    variables = node.variables
    common = asserted(variable.whole)
    dtype, shape = common.type_of_content
    # It exists as long as its handle, as variables do eagerly.
    attributes = {
        "dtype": dtype,
        "shape": shape,
        "shared_name": compat.anonymous_name(),
    }
    (handle,) = node.builder.add(
        "VarHandleOp",
        [],
        attributes,
        [(tf.resource, tf.TensorShape(()))],
        handle=common.handle,
    )
    whole = node.converter.assemble(variables.content_of(variable))
    variables.add_in_order(
        "AssignVariableOp",
        [handle, whole],
        {"dtype": dtype, "validate_shape": False},
        reads=False,
    )
    return dataclasses.replace(variable, whole=handle)


def _compute_whole(node: Node, inputs: Values) -> Values:
    """Compute an operation as one device does, with whole variables."""
    converter = node.converter
    if any(not v.is_replicated and not v.is_partial for v in inputs):
        node.scope.computed_once[node.operation] = node.reason
    effect = effect_of(node.operation)
    if effect:
        return _add_effect(node, inputs, effect)
    # Functions get what variables hold, not their handles.
    require(node.builder.can_exchange or not uses_handles(node))
    if not _should_run_on_towers(node, inputs):
        operands = [converter.assemble(value) for value in inputs]
        outputs = _copy_in_order(
            node, operands, repeats=_is_constant(node, inputs)
        )
        return [Value(REPLICATED, whole=tensor) for tensor in outputs]
    local_operands = [converter.replicate(value) for value in inputs]
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
    """Add an operation with an effect, which happens once for all towers.

    Inside of a function nothing is added: the whole function is computed once.
    """
    builder, converter = node.builder, node.converter
    require(builder.can_exchange)
    targets = written(node.operation)
    mirrored = [k for k in targets if _is_on_every_tower(inputs[k])]
    is_write = bool(targets) and not node.num_outputs
    if effect < Effect.EXTERNAL and is_write and mirrored == targets:
        # Each tower writes to its copies.
        local_operands = [converter.replicate(value) for value in inputs]
        outputs = _copy_in_order(node, local_operands, reads=False)
        return [Value(REPLICATED, local) for local in outputs]
    at_root = "ranks" in node.options.axes and effect is Effect.EXTERNAL
    whole_operands = [converter.assemble(value) for value in inputs]
    also = AT_ROOT if at_root else ONCE
    results = _copy_in_order(node, whole_operands, reads=False, also=also)
    if at_root:
        results = [_broadcast_from_root(builder, whole) for whole in results]
    if effect is Effect.EXTERNAL:
        # A function of Python may write any variable.
        node.variables.contents.clear()
    for index in targets if at_root else mirrored:
        _share_content(node, inputs[index], at_root)
    return [Value(REPLICATED, whole=whole) for whole in results]


def _copy_in_order(
    node: Node,
    operands: Sequence[Tensor],
    reads: bool = True,
    also: Axes = ONCE,
    repeats: bool = False,
) -> list[Tensor]:
    """Add an operation after earlier users of the same resources."""
    results = node.copy(
        operands, has_effect=not reads, also=also, is_repeated=repeats
    )
    if node.operation.op_def.is_stateful or uses_handles(node):
        node.variables.record_use(node.builder.last, reads)
    return results


def _broadcast_from_root(builder: Builder, whole: Tensor) -> Tensor:
    """Return the result of the first process on all processes."""
    if whole.dtype == tf.resource:
        # Loops return the handles that they take.
        return whole
    if whole.dtype != tf.variant:
        return builder.exchange("root", whole)
    # Processes exchange a list of tensors as a string.
    text = builder.op("SerializeTensor", [whole], ())
    text = builder.exchange("root", text)
    return builder.op("ParseTensor", [text], whole.shape, out_type=tf.variant)


def _share_content(node: Node, variable: Value, at_root: bool) -> None:
    """Give all towers the new value of a variable that was written once.

    Args:
        node: the operation.
        variable: the handle.
        at_root: whether only the first process has written it.
    """
    converter, variables = node.converter, node.variables
    written_once = Value(REPLICATED, whole=converter.assemble(variable))
    content = variables.content_of(written_once)
    whole = converter.assemble(content)
    if at_root:
        whole = node.builder.exchange("root", whole)
    # Its copies are not written yet.
    variables.assign(variable, Value(REPLICATED, whole=whole))


def _should_run_on_towers(node: Node, inputs: Values) -> bool:
    """Whether all towers compute an operation on replicated values.

    Recomputing small values is cheaper than an exchange, and towers have the
    values of their own copies of variables.
    """
    if uses_handles(node) or not all(v.is_replicated for v in inputs):
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


def uses_handles(node: Node) -> bool:
    """Whether an operation gets handles of resources."""
    return any(t.dtype == tf.resource for t in node.operation.inputs)


def _is_small(shape: tf.TensorShape) -> bool:
    """Whether a tensor is too small to be worth an exchange."""
    size = shape.num_elements()
    return size is not None and size <= LARGEST


def _is_on_every_tower(value: Value) -> bool:
    """Whether every tower has the whole value, without an exchange."""
    return value.layout == REPLICATED and value.local is not None


def _is_constant(node: Node, inputs: Values) -> bool:
    """Whether an operation returns small constants, which need no exchange.

    Random draws do not count: XLA may compile only some of their repetitions.
    """
    return (
        all(map(_is_repeated, inputs))
        and all(map(_is_small, node.shapes))
        and not node.operation.op_def.is_stateful
        and not is_draw(node.type)
        and not called_graphs(node.operation)
    )


def _is_repeated(value: Value) -> bool:
    """Whether every function that uses a value computes it itself."""
    operation = None if value.whole is None else value.whole.operation
    return operation is not None and operation.is_repeated
