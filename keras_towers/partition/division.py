"""Divides an operation along one of its axes, or keeps partial sums partial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.conversions import Converter
from keras_towers.partition.factors import Factors, Labels
from keras_towers.partition.layouts import (
    PARTIAL,
    Layout,
    ListOf,
    Sharded,
    Value,
    Values,
    WholeFrom,
    require,
    required,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node
from keras_towers.partition.sizes import UNKNOWN, Size, is_data_dependent


def divide(node: Node, inputs: Values, factors: Factors) -> Values:
    """Divide an operation along an axis, or apply it to partial sums.

    Raises:
        NotDivided: no axis can be divided, and the operation is not linear.
    """
    partitioner = node.partitioner
    require(not any(isinstance(value.layout, ListOf) for value in inputs))
    labels_of_inputs = factors.labels(inputs)
    chosen = _choose_axis(partitioner, inputs, labels_of_inputs, factors)
    if chosen is None:
        return _apply_linearly(node, inputs, factors)
    label, layout = chosen
    operands: list[Tensor] = []
    for index, value in enumerate(inputs):
        labels = labels_of_inputs[index]
        if label not in labels:
            operands.append(
                _replicated_operand(partitioner, index, value, factors)
            )
            continue
        along = layout.at_axis(labels.index(label))
        rows = partitioner.shard(value, along)
        if factors.needs_rows:
            rows = _pad_empty_tower(partitioner, rows, along)
        operands.append(rows)
    layouts: list[Layout] = [
        layout.at_axis(labels.index(label)) if label in labels else PARTIAL
        for labels in factors.outputs
    ]
    outputs = node.run_on_towers(
        operands,
        *layouts,
        shapes=factors.shapes(inputs),
        attributes=factors.attributes,
    )
    if factors.needs_rows:
        for output in outputs:
            output.local = _drop_padding(partitioner, output, layout)
    if _should_gather_rows(node, inputs, outputs):
        partitioner.has_gathered = True
        (output,) = outputs
        output.whole_from = WholeFrom(
            node.operation, 0, list(inputs), gathers=True
        )
    return outputs


def _should_gather_rows(node: Node, inputs: Values, outputs: Values) -> bool:
    """Whether to gather the rows of a product, because its sum is larger.

    The gradient of a large matrix is such a sum, over the examples, of products
    of a layer's inputs and output gradients. Gathering both is known as
    sufficient factor broadcasting (Xie et al., arXiv 1511.08486).
    """
    partitioner = node.partitioner
    ratio = partitioner.options.gather_ratio
    if (
        ratio is None
        or not partitioner.can_exchange
        or len(outputs) != 1
        or not outputs[0].is_partial
    ):
        return False
    if not all(value.sharded for value in inputs):
        return False
    entries = 0
    for value in inputs:
        layout, _ = value.as_rows()
        others = [s for a, s in enumerate(value.sizes) if a != layout.axis]
        if not all(isinstance(size, int) for size in others):
            return False
        entries += layout.rows_per_unit * math.prod(others)
    size = node.shapes[0].num_elements()
    return size is not None and size >= ratio * entries


def _replicated_operand(
    partitioner: Converter, index: int, value: Value, factors: Factors
) -> Tensor:
    """Return the operand of an input that is not divided."""
    if index in factors.entries:
        return partitioner.size_vector_like(value, factors.entries[index])
    return partitioner.replicate(value)


def _choose_axis(
    partitioner: Converter,
    inputs: Values,
    labels_of_inputs: Sequence[Labels],
    factors: Factors,
) -> tuple[Any, Sharded] | None:
    """Return the label of the axis to divide and its layout, or None."""
    pairs = list(zip(inputs, labels_of_inputs, strict=True))
    for value, labels in pairs:
        layout = value.sharded
        if layout is not None and factors.may_divide(labels[layout.axis]):
            return labels[layout.axis], layout
    if all(value.sharded is None for value in inputs):
        return None
    # No sharded input fits, so one has to be gathered. Look for another axis
    # that has rows.
    for value, labels in pairs:
        sizes = zip(value.shape or (), labels, strict=True)
        for axis, (size, label) in enumerate(sizes):
            if not isinstance(size, Size) or not factors.may_divide(label):
                continue
            layout = Sharded(axis, partitioner.unit)
            rows = layout.rows_per_unit_in(size)
            if rows:
                return label, dataclasses.replace(layout, rows=rows)
    return None


def _apply_linearly(node: Node, inputs: Values, factors: Factors) -> Values:
    """Apply a linear operation to each tower's partial sum."""
    partitioner = node.partitioner
    parts = {k for k, value in enumerate(inputs) if value.is_partial}
    groups = [group for group in factors.linear if parts <= {*group}]
    require(parts and groups and not any(value.sharded for value in inputs))
    for k, value in enumerate(inputs):
        require(k in groups[0] or _is_finite_factor(node, k, value))
    operands = [
        partitioner.to_partial(value)
        if k in groups[0]
        else _replicated_operand(partitioner, k, value, factors)
        for k, value in enumerate(inputs)
    ]
    outputs = node.run_on_towers(
        operands,
        *[PARTIAL] * node.num_outputs,
        shapes=factors.shapes(inputs),
    )
    for index, output in enumerate(outputs):
        if len(parts) == 1 and _has_size_of(node, index, *parts):
            # The input is no larger, so it can be exchanged in place of the
            # output, which saves an exchange if the input is exchanged anyway.
            output.whole_from = WholeFrom(
                node.operation,
                index,
                list(inputs),
                gathers=all(inputs[k].gathers for k in parts),
            )
    return outputs


# Operations whose outputs are finite or NaN, and operations whose outputs are
# infinite only if an input is.
_BOUNDED = """
    Tanh Sigmoid Softmax Sign Sin Cos Erf Relu6 OnesLike ZerosLike
"""
_MOVES = """
    Identity StopGradient Reshape ExpandDims Squeeze Transpose BroadcastTo Tile
    Fill OneHot Pack ConcatV2 StridedSlice Slice Neg Abs Select SelectV2
"""
_QUOTIENTS = ("RealDiv", "Div")
# Operations whose factor only selects entries, or whose quotient is never
# infinite.
_HARMLESS = ("ReluGrad", "Relu6Grad", "LeakyReluGrad", "DivNoNan")


def _is_finite_factor(node: Node, index: int, value: Value) -> bool:
    """Whether a partial sum may be multiplied before it is added up.

    It may not if the factor can be infinite: a tower's term may be 0 although
    the sum is not, and 0 times infinity is NaN. The same holds for division by
    0.
    """
    tensor = node.operation.inputs[index]
    if node.type not in _QUOTIENTS:
        return node.type in _HARMLESS or not _may_be_infinite(tensor)
    known = value.known
    if known is None:
        known = tf.get_static_value(tensor)
    return known is not None and not any(map(_may_be_zero, np.ravel(known)))


def _may_be_zero(number: Any) -> bool:
    return number is UNKNOWN or is_data_dependent(number) or number == 0


def _may_be_infinite(tensor: Any) -> bool:
    """Whether a traced tensor may have an infinite entry."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        operation, dtype = tensor.op, tensor.dtype
        if tensor.name in seen or not (dtype.is_floating or dtype.is_complex):
            continue
        seen.add(tensor.name)
        if operation.type == "Const":
            if np.isinf(tf.get_static_value(tensor)).any():
                return True
        elif operation.type == "Cast":
            (before,) = operation.inputs
            # No integer is too large for float32.
            is_real = before.dtype.is_floating or before.dtype.is_complex
            size, size_before = (
                one.real_dtype.size for one in (dtype, before.dtype)
            )
            if size < 4 or (is_real and size < size_before):
                return True
            waiting.append(before)
        elif operation.type in _MOVES.split():
            waiting += operation.inputs
        elif operation.type not in _BOUNDED.split():
            return True
    return False


def _has_size_of(node: Node, index: int, part: int) -> bool:
    """Whether an output has the size and the dtype of an input."""
    before, after = node.operation.inputs[part], node.operation.outputs[index]
    size = before.shape.num_elements()
    is_as_large = size is not None and size == after.shape.num_elements()
    return is_as_large and before.dtype == after.dtype


def _pad_empty_tower(
    partitioner: Converter, tensor: Tensor, layout: Sharded
) -> Tensor:
    """Append rows of zeros for one unit if the tower has none."""
    rank, count = required(tensor.shape.rank), layout.unit.count
    least = partitioner.compute_size("Maximum", count, 1)
    more = partitioner.compute_size("Sub", least, count)
    more = partitioner.scaled_size(layout.rows_per_unit, more)
    ends = [[0] * rank, partitioner.size_at_axis(layout.axis, rank, more)]
    widths = partitioner.op("Pack", ends, (rank, 2), is_repeated=True, axis=1)
    # OneDNN would fuse "Pad" with a convolution, without padding.
    zero = partitioner.constant(0, tensor.dtype)
    return partitioner.op("PadV2", [tensor, widths, zero], tensor.shape)


def _drop_padding(
    partitioner: Converter, output: Value, divided_by: Sharded
) -> Tensor:
    """Drop the output for rows that ``_pad_empty_tower`` has appended."""
    layout, tensor = output.sharded, required(output.local)
    if layout is not None:
        count = partitioner.local_rows(layout)
        return partitioner.slice_rows(
            tensor, output.sizes, layout.axis, 0, count
        )
    some = partitioner.op("Greater", [divided_by.unit.count, 0], ())
    zeros = partitioner.op("ZerosLike", [tensor], tensor.shape)
    return partitioner.op("SelectV2", [some, tensor, zeros], tensor.shape)
