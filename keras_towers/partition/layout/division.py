"""Divides an operation along an axis, or applies it to partial sums.

An axis can be divided if the operation treats all entries along it
independently. ``layout_pass.py`` calls ``divide``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.layouts import (
    PARTIAL,
    REPLICATED,
    Layout,
    ListOf,
    Sharded,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import require, unless_none
from keras_towers.partition.ir.registry import (
    Factors,
    Labels,
    NewAxis,
    facts_of,
)
from keras_towers.partition.ir.sizes import (
    UNKNOWN,
    Dimension,
    Size,
    is_data_dependent,
)
from keras_towers.partition.ir.values import Value, Values, WholeFrom
from keras_towers.partition.layout.conversions import Converter
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.units import Units


def divide(node: Node, inputs: Values, factors: Factors) -> Values:
    """Divide an operation along an axis, or apply it to partial sums.

    Raises:
        NotDivided: no axis can be divided, and the operation is not linear.
    """
    require(not any(isinstance(value.layout, ListOf) for value in inputs))
    labels_of_inputs = factors.labels(inputs)
    chosen = _choose_axis(node.units, inputs, labels_of_inputs, factors)
    if chosen is None:
        return _apply_linearly(node, inputs, factors)
    return _divide_along(node, inputs, factors, *chosen)


def rows_along(
    node: Node, inputs: Values, factors: Factors, index: int, layout: Sharded
) -> Tensor:
    """Return the rows of an output, divided along their axis.

    Args:
        node: the operation.
        inputs: its inputs, which are replicated.
        factors: its axes.
        index: the index of the output.
        layout: the layout of the rows.

    Raises:
        NotDivided: the operation cannot be divided along this axis.
    """
    label = unless_none(factors.outputs[index])[layout.axis]
    require(not isinstance(label, NewAxis) and factors.may_divide(label))
    return _divide_along(node, inputs, factors, label, layout)[index].own


def _divide_along(
    node: Node,
    inputs: Values,
    factors: Factors,
    label: Hashable,
    layout: Sharded,
) -> Values:
    """Divide an operation along an axis, given the layout of its rows."""
    units, converter = node.units, node.converter
    labels_of_inputs = factors.labels(inputs)
    operands: list[Tensor] = []
    for index, value in enumerate(inputs):
        labels = labels_of_inputs[index]
        if label not in labels:
            operands.append(
                _replicated_operand(converter, index, value, factors)
            )
            continue
        along = layout.at_axis(labels.index(label))
        rows = converter.shard(value, along)
        if factors.needs_rows:
            rows = units.pad_empty(rows, along)
        operands.append(rows)
    layouts: list[Layout] = []
    for labels_of_output in factors.outputs:
        if labels_of_output is None:
            layouts.append(REPLICATED)
        elif label in labels_of_output:
            layouts.append(layout.at_axis(labels_of_output.index(label)))
        else:
            layouts.append(PARTIAL)
    outputs = node.run_on_towers(
        operands,
        *layouts,
        shapes=factors.shapes(inputs),
        attributes=factors.attributes,
    )
    if factors.needs_rows:
        for output in outputs:
            output.local = _drop_padding(units, output, layout)
    if _should_gather_rows(node, inputs, outputs):
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
    ratio = node.options.gather_ratio
    if (
        ratio is None
        or not node.builder.can_exchange
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
        known = [size for size in others if isinstance(size, int)]
        if len(known) < len(others):
            return False
        entries += layout.rows_per_unit * math.prod(known)
    size = node.shapes[0].num_elements()
    return size is not None and size >= ratio * entries


def _replicated_operand(
    converter: Converter, index: int, value: Value, factors: Factors
) -> Tensor:
    """Return an undivided input, as every tower needs it."""
    if index in factors.entries:
        return converter.size_vector_like(value, factors.entries[index])
    return converter.replicate(value)


def _choose_axis(
    units: Units,
    inputs: Values,
    labels_of_inputs: Sequence[Labels],
    factors: Factors,
) -> tuple[Hashable, Sharded] | None:
    """Return the label of the axis to divide and its layout, or None."""
    pairs = list(zip(inputs, labels_of_inputs, strict=True))
    may_divide = [
        (labels[value.sharded.axis], value.sharded)
        for value, labels in pairs
        if value.sharded is not None
        and factors.may_divide(labels[value.sharded.axis])
    ]
    # Examples first: a variable is gathered for them.
    may_divide.sort(key=lambda pair: pair[1].of_variables)
    layouts = [value.sharded for value in inputs if value.sharded is not None]
    if all(layout.of_variables for layout in layouts):
        return may_divide[0] if may_divide else None
    if may_divide and not may_divide[0][1].of_variables:
        return may_divide[0]
    # No sharded input fits, so one has to be gathered. Look for another axis
    # that has rows.
    for value, labels in pairs:
        sizes = zip(value.shape or (), labels, strict=True)
        for axis, (size, label) in enumerate(sizes):
            if isinstance(size, Size) and factors.may_divide(label):
                rows = units.find_rows(axis, size)
                if rows is not None:
                    return label, rows
    return None


def _apply_linearly(node: Node, inputs: Values, factors: Factors) -> Values:
    """Apply a linear operation to each tower's partial sum."""
    converter = node.converter
    parts = {k for k, value in enumerate(inputs) if value.is_partial}
    groups = [group for group in factors.linear if parts <= {*group}]
    require(parts and groups and not any(value.sharded for value in inputs))
    if node.options.over_columns:
        traced = [node.operation.inputs[k] for k in parts]
        require(all(len(tensor.consumers()) == 1 for tensor in traced))
    for k, value in enumerate(inputs):
        require(k in groups[0] or is_finite_factor(node, k, value))
    operands = [
        converter.to_partial(value)
        if k in groups[0]
        else _replicated_operand(converter, k, value, factors)
        for k, value in enumerate(inputs)
    ]
    outputs = node.run_on_towers(
        operands, *[PARTIAL] * node.num_outputs, shapes=factors.shapes(inputs)
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


def _has_size_of(node: Node, index: int, part: int) -> bool:
    """Whether an output has the size and the dtype of an input."""
    before, after = node.operation.inputs[part], node.operation.outputs[index]
    size = before.shape.num_elements()
    is_as_large = size is not None and size == after.shape.num_elements()
    return is_as_large and before.dtype == after.dtype


def _drop_padding(units: Units, output: Value, divided_by: Sharded) -> Tensor:
    """Drop the output rows that come from ``Units.pad_empty``."""
    builder = units.builder
    layout, tensor = output.sharded, output.own
    if layout is not None:
        return units.drop_padding(tensor, output.sizes, layout)
    some = builder.op("Greater", [divided_by.unit.count, 0], ())
    return builder.only_if(some, tensor)


def is_finite_factor(node: Node, index: int, value: Value) -> bool:
    """Whether a factor is finite, so that it may scale the terms of a sum.

    With an infinite factor, a tower's term of 0 would become NaN, even if the
    sum is not 0. The same holds for division by 0.
    """
    tensor = node.operation.inputs[index]
    if node.facts.factor != "divides":
        return node.facts.factor == "selects" or not _may_be_infinite(tensor)
    known = value.known
    if known is None:
        known = tf.get_static_value(tensor)
    return known is not None and not any(map(_may_be_zero, np.ravel(known)))


def _may_be_zero(number: Dimension) -> bool:
    return number is UNKNOWN or is_data_dependent(number) or number == 0


def _may_be_infinite(tensor: tf.Tensor) -> bool:
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
                each.real_dtype.size for each in (dtype, before.dtype)
            )
            if size < 4 or (is_real and size < size_before):
                return True
            waiting.append(before)
        elif facts_of(operation.type).bounds == "inputs":
            waiting += operation.inputs
        elif facts_of(operation.type).bounds is None:
            return True
    return False
