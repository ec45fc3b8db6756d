"""Divides operations by their axes, or leaves sums to be summed later."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

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
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node
from keras_towers.partition.sizes import Size


def divided(
    partition: Converter, node: Node, inputs: Values, factors: Factors
) -> Values:
    """Divide an operation by an axis of its inputs, or leave sums to later.

    Args:
        partition: makes the operations.
        node: the operation.
        inputs: its inputs.
        factors: which of the axes of its inputs and outputs are the same.

    Raises:
        NotDivided: if it cannot be.
    """
    require(not any(isinstance(value.layout, ListOf) for value in inputs))
    labels_of_inputs = factors.labels(inputs)
    chosen = _chosen(partition, inputs, labels_of_inputs, factors)
    if chosen is None:
        return _linear(partition, node, inputs, factors)
    label, layout = chosen
    operands: list[Tensor] = []
    for index, value in enumerate(inputs):
        labels = labels_of_inputs[index]
        if label not in labels:
            operands.append(_common_input(partition, index, value, factors))
            continue
        along = layout.along(labels.index(label))
        rows = partition.rows(value, along)
        if factors.needs_rows:
            rows = _with_a_row(partition, rows, along)
        operands.append(rows)
    layouts: list[Layout] = [
        layout.along(labels.index(label)) if label in labels else PARTIAL
        for labels in factors.outputs
    ]
    outputs = partition.on_towers(
        node,
        operands,
        *layouts,
        shapes=factors.shapes(inputs),
        attributes=factors.attributes,
    )
    if factors.needs_rows:
        for output in outputs:
            output.local = _without_a_row(partition, output, layout)
    if _has_short_rows(partition, node, inputs, outputs):
        partition.has_gathered = True
        (output,) = outputs
        output.whole_from = WholeFrom(
            node.operation, 0, list(inputs), gathers=True
        )
    return outputs


def _has_short_rows(
    partition: Converter, node: Node, inputs: Values, outputs: Values
) -> bool:
    """Whether a sum over rows is so much larger that the rows are gathered.

    Such is the gradient of a large matrix, the product of a layer's inputs and
    of gradients. Both are gathered, as in Xie et al., "Distributed
    Machine Learning via Sufficient Factor Broadcasting" (arXiv 1511.08486).
    """
    ratio = partition.gather_ratio
    if ratio is None or len(outputs) != 1 or not outputs[0].is_partial:
        return False
    if not all(value.sharded for value in inputs):
        return False
    entries = 0
    for value in inputs:
        layout, _ = value.as_rows()
        others = [s for a, s in enumerate(value.sizes) if a != layout.axis]
        if not all(isinstance(size, int) for size in others):
            return False
        entries += layout.count * math.prod(others)
    size = node.shapes[0].num_elements()
    return size is not None and size >= ratio * entries


def _common_input(
    partition: Converter, index: int, value: Value, factors: Factors
) -> Tensor:
    """What all towers are given for an input."""
    if index in factors.entries:
        return partition.vector_like(value, factors.entries[index])
    return partition.replicated(value)


def _chosen(
    partition: Converter,
    inputs: Values,
    labels_of_inputs: Sequence[Labels],
    factors: Factors,
) -> tuple[Any, Sharded] | None:
    """The axis by which an operation is divided, and how it is, or None."""
    pairs = list(zip(inputs, labels_of_inputs, strict=True))
    for value, labels in pairs:
        layout = value.sharded
        if layout is not None and factors.may_divide(labels[layout.axis]):
            return labels[layout.axis], layout
    if all(value.sharded is None for value in inputs):
        return None
    # Something has to be gathered; the rest may be divided nevertheless.
    for value, labels in pairs:
        sizes = zip(value.shape or (), labels, strict=True)
        for axis, (size, label) in enumerate(sizes):
            if not isinstance(size, Size) or not factors.may_divide(label):
                continue
            layout = Sharded(axis, partition.unit)
            rows = layout.units_in(size)
            if rows:
                return label, dataclasses.replace(layout, rows=rows)
    return None


def _linear(
    partition: Converter, node: Node, inputs: Values, factors: Factors
) -> Values:
    """What is linear leaves parts of a sum parts of a sum."""
    parts = {k for k, value in enumerate(inputs) if value.is_partial}
    groups = [group for group in factors.linear if parts <= {*group}]
    require(parts and groups and not any(value.sharded for value in inputs))
    operands = [
        partition.partial(value)
        if k in groups[0]
        else _common_input(partition, k, value, factors)
        for k, value in enumerate(inputs)
    ]
    outputs = partition.on_towers(
        node,
        operands,
        *[PARTIAL] * node.num_outputs,
        shapes=factors.shapes(inputs),
    )
    for index, output in enumerate(outputs):
        if len(parts) == 1 and _keeps_size(node, index, *parts):
            # What it follows from is needed elsewhere, or is no more.
            output.whole_from = WholeFrom(
                node.operation,
                index,
                list(inputs),
                gathers=all(inputs[k].gathers for k in parts),
            )
    return outputs


def _keeps_size(node: Node, index: int, part: int) -> bool:
    """Whether an output is as large as an input, and of the same dtype."""
    before, after = node.operation.inputs[part], node.operation.outputs[index]
    size = before.shape.num_elements()
    is_as_large = size is not None and size == after.shape.num_elements()
    return is_as_large and before.dtype == after.dtype


def _with_a_row(
    partition: Converter, tensor: Tensor, layout: Sharded
) -> Tensor:
    """Return rows, and where there are none a row of zeros for one unit."""
    build, rank, count = partition.builder, tensor.shape.rank, layout.unit.count
    least = build.op("Maximum", [count, 1], (), is_repeated=True)
    more = build.op("Sub", [least, count], (), is_repeated=True)
    more = partition.times(layout.count, more)
    ends = [[0] * rank, partition.along(layout.axis, rank, more, 0)]
    widths = build.op("Pack", ends, (rank, 2), is_repeated=True, axis=1)
    # OneDNN would fuse "Pad" with a convolution, and pad no images.
    zero = build.constant(0, tensor.dtype)
    return build.op("PadV2", [tensor, widths, zero], tensor.shape)


def _without_a_row(
    partition: Converter, output: Value, divided_by: Sharded
) -> Tensor:
    """Return what was computed of rows that are there."""
    build, layout, tensor = partition.builder, output.sharded, output.local
    assert tensor is not None
    count = divided_by.unit.count
    if layout is not None:
        length = partition.times(layout.count, count)
        return partition.sliced(tensor, output.sizes, layout.axis, 0, length)
    some = build.op("Greater", [count, 0], ())
    zeros = build.op("ZerosLike", [tensor], tensor.shape)
    return build.op("SelectV2", [some, tensor, zeros], tensor.shape)
