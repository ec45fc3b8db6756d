"""Shapes and sizes, and what makes, moves, joins or takes apart axes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.partition.builder import SIZE
from keras_towers.partition.division import divided
from keras_towers.partition.factors import ONE, Factors, along
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    NotDivided,
    Shape,
    Sharded,
    Value,
    Values,
    require,
    sizes_of,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, axes, rule, shape_of
from keras_towers.partition.rules.reductions import axes_of, numbers
from keras_towers.partition.sizes import UNKNOWN, Size


@rule("Shape", "ShapeN", "Size", "Rank")
def _sizes(node: Node, *values: Value) -> Values:
    partition = node.partition
    require(not any(isinstance(value.layout, ListOf) for value in values))
    results = []
    for index, value in enumerate(values):
        known: Any = value.sizes
        dtype = node.output_dtype(index)
        if node.type == "Rank":
            whole, known = partition.constant(value.rank, dtype), value.rank
        elif node.type == "Size":
            one = partition.constant(1, SIZE)
            sizes = _measured(partition, value)
            product = functools.reduce(partition.product, sizes, one)
            whole, known = partition.cast(product, dtype), math.prod(known)
        else:
            whole = partition.vector(_measured(partition, value), dtype)
        known = np.array(known, object)
        results.append(Value(REPLICATED, whole=whole, known=known))
    return results


def _measured(partition: Partitioner, value: Value) -> list[Tensor]:
    """The sizes of a value on one device."""
    entries: list[Tensor] = []
    for axis, size in enumerate(value.sizes):
        entry = partition.size(size)
        if entry is None:
            # No axis of rows, so that all have as many.
            tensor = value.local if value.whole is None else value.whole
            assert tensor is not None
            entry = partition.length(tensor, axis)
            if entry.on_towers:
                entry = partition.exchange("first", entry)
        entries.append(entry)
    return entries


@shape_of("Fill")
def target_sizes(node: Node, target: Value, *rest: Value) -> Shape:
    """Return the shape that an operation is given."""
    require(node.shapes[0].rank is not None)
    output = sizes_of(node.shapes[0])
    if target.known is None:
        return output
    return tuple(
        traced if size is UNKNOWN or size == -1 else size
        for size, traced in zip(np.ravel(target.known), output, strict=True)
    )


def rows_of_sizes(partition: Partitioner, sizes: Sequence[Any]) -> Sharded:
    """Return where a tensor of some sizes has rows of a unit.

    Raises:
        NotDivided: if it has none, or may have them along several axes.
    """
    layouts = [partition.rows_along(a, s) for a, s in enumerate(sizes)]
    grown = [
        layout
        for layout, size in zip(layouts, sizes, strict=True)
        if isinstance(size, Size) or layout is not None
    ]
    if len(grown) != 1 or grown[0] is None:
        raise NotDivided
    return grown[0]


@rule("BroadcastTo")
def _broadcast(node: Node, value: Value, target: Value) -> Values:
    partition = node.partition
    sizes = target_sizes(node, target)
    ahead = len(sizes) - len(value.sizes)
    if value.sharded is not None:
        layout = value.sharded.along(value.sharded.axis + ahead)
        # A single row may be repeated as often as a size says.
        require(sizes[layout.axis] == layout.size)
    else:
        layout = rows_of_sizes(partition, sizes)
        axis = layout.axis - ahead
        if axis >= 0 and value.sizes[axis] != 1:
            own = layout.along(axis)
            value = Value(own, partition.rows(value, own))
    return node.of_shape([value, target], 1, sizes, layout)


@rule("Fill")
def _filled(node: Node, target: Value, value: Value) -> Values:
    sizes = target_sizes(node, target)
    layout = rows_of_sizes(node.partition, sizes)
    return node.of_shape([target, value], 0, sizes, layout)


@shape_of("BroadcastTo")
def _shape_of_broadcast(node: Node, value: Value, target: Value) -> Shape:
    return target_sizes(node, target)


@shape_of("Range")
def _shape_of_range(node: Node, start: Value, end: Value, step: Value) -> Shape:
    require(start.number == 0 and step.number == 1)
    return (end.number,)


@shape_of("Reshape")
def _shape_of_reshape(node: Node, value: Value, target: Value) -> Shape:
    """Find the one size of a shape that is not known by all others."""
    sizes = list(target_sizes(node, target))
    if sizes.count(UNKNOWN) != 1 or value.shape is None:
        return tuple(sizes)
    at = sizes.index(UNKNOWN)
    rest = math.prod(sizes[:at] + sizes[at + 1 :])
    if isinstance(rest, Size) or rest:
        sizes[at] = math.prod(value.shape) // rest
    return tuple(sizes)


@rule("Reshape")
def _reshaped(node: Node, value: Value, target: Value) -> Values:
    sizes = _shape_of_reshape(node, value, target)
    if value.is_partial:
        factors = Factors([None, None], [[None] * len(sizes)], [[0]])
        return divided(node, [value, target], factors)
    before, _ = value.as_rows()
    layout = _rows_after(before, value.sizes, sizes)
    return node.of_shape([value, target], 1, sizes, layout)


def _rows_after(layout: Sharded, shape: Shape, sizes: Shape) -> Sharded:
    """Where the rows are in another shape of the same entries.

    An entry's place is (what is ahead, unit, what is behind): what is ahead are
    the axes before and the blocks, what is behind the rows and axes after.
    """
    ahead: Any = math.prod(shape[: layout.axis]) * layout.blocks
    behind = math.prod(shape[layout.axis + 1 :]) * layout.rows
    for axis, size in enumerate(sizes):
        count, before = layout.units_in(size) or 0, math.prod(sizes[:axis])
        blocks = ahead // before if count and before != 0 else None
        if isinstance(blocks, int) and blocks and not count % blocks:
            rows = count // blocks
            if math.prod(sizes[axis + 1 :]) * rows == behind:
                return Sharded(axis, layout.unit, blocks, rows)
    raise NotDivided


@axes("Tile")
def _tiled_axes(node: Node, value: Value, times: Value) -> Factors:
    known = [None] * value.rank if times.known is None else times.known
    labels = [
        axis if number == 1 else None for axis, number in enumerate(known)
    ]
    return Factors([labels, None], [labels], [[0]])


@rule("Tile")
def _tiled(node: Node, value: Value, times: Value) -> Values:
    """What all have is repeated as rows."""
    partition = node.partition
    require(value.sharded is None)
    sizes = _shape_of_tile(node, value, times)
    for axis, size in enumerate(sizes):
        layout = partition.rows_along(axis, size)
        # The number of channels may be a multiple of that of examples.
        if layout is None or value.sizes[axis] != 1:
            continue
        shape = partition.local_target(times, times.known, layout)
        given = [partition.replicated(value), shape]
        return node.on_towers(given, layout, shapes=[sizes])
    raise NotDivided


@shape_of("Tile")
def _shape_of_tile(node: Node, value: Value, times: Value) -> Shape:
    require(times.known is not None)
    return tuple(
        size * number
        for size, number in zip(value.sizes, times.known, strict=True)
    )


# ---- whole axes --------------------------------------------------------------


@axes("Transpose", "ConjugateTranspose")
def _transposed(node: Node, value: Value, order: Value) -> Factors:
    return Factors([range(value.rank), None], [numbers(order)], [[0]])


def _with_axis(value: Value, at: int, label: Any) -> list[Any]:
    """The labels of a value's axes, and of a new one among them."""
    labels: list[Any] = list(range(value.rank))
    labels.insert(at % (value.rank + 1), label)
    return labels


@axes("ExpandDims")
def _expanded(node: Node, value: Value, at: Value) -> Factors:
    labels = _with_axis(value, numbers(at)[0], ONE)
    return Factors([range(value.rank), None], [labels], [[0]])


@axes("Pack")
def _axes_of_pack(node: Node, *values: Value) -> Factors:
    labels, count = range(values[0].rank), len(values)
    output = _with_axis(values[0], node.attr("axis"), None)
    return Factors([labels] * count, [output], [range(count)])


@axes("OneHot")
def _one_hot(node: Node, places: Value, *options: Value) -> Factors:
    output = _with_axis(places, node.attr("axis"), None)
    return Factors([range(places.rank), *[None] * len(options)], [output])


@axes("Squeeze")
def _squeezed(node: Node, value: Value) -> Factors:
    gone = {axis % value.rank for axis in node.attr("squeeze_dims")}
    # Without axes, those of size 1 go, which may be the one of a single row.
    require(gone)
    return along(gone, [value], 1, [[0]], keeps=False)


@axes("Unpack")
def _unpacked(node: Node, value: Value) -> Factors:
    gone = [node.attr("axis") % value.rank]
    return along(gone, [value], node.num_outputs, [[0]], keeps=False)


@axes("ReverseV2", "Roll")
def _reversed(node: Node, *inputs: Value) -> Factors:
    return along(axes_of(inputs[-1], inputs[0].rank), inputs, 1, [[0]])


@axes("ReverseSequence")
def _reversed_sequence(node: Node, value: Value, lengths: Value) -> Factors:
    seq_dim, batch_dim = node.attr("seq_dim"), node.attr("batch_dim")
    labels = [None if a == seq_dim else a for a in range(value.rank)]
    return Factors([labels, [batch_dim]], [labels], [[0]])


@axes("ConcatV2")
def _axes_of_concat(node: Node, *values: Value) -> Factors:
    gone, count = axes_of(values[-1], values[0].rank), len(values) - 1
    labels = [None if a in gone else a for a in range(values[0].rank)]
    return Factors([*[labels] * count, None], [labels], [range(count)])


@rule("ConcatV2")
def _concat(node: Node, *values: Value) -> Values:
    """Rows of several tensors, one after the other, are blocks of rows."""
    *parts, over = values
    layouts, operands = zip(*[part.as_rows() for part in parts], strict=True)
    first, shape = layouts[0], list(parts[0].sizes)
    require(axes_of(over, len(shape)) == [first.axis])
    like = {dataclasses.replace(layout, blocks=1) for layout in layouts}
    require(len(like) == 1)
    blocks = sum(layout.blocks for layout in layouts)
    joined = dataclasses.replace(first, blocks=blocks)
    shape[joined.axis] = joined.size
    given = [*operands, node.partition.replicated(over)]
    return node.on_towers(given, joined, shapes=[shape])
