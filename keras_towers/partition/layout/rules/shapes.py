"""Shapes, and operations that create, move, join or split axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from keras_towers.partition.ir.effects import is_draw
from keras_towers.partition.ir.layouts import REPLICATED, ListOf, Shape, Sharded
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import NotDivided, asserted, require
from keras_towers.partition.ir.registry import (
    Factors,
    NewAxis,
    along_axes,
    operation,
)
from keras_towers.partition.ir.sizes import UNKNOWN, Size, broadcast
from keras_towers.partition.ir.values import (
    Value,
    Values,
    known_axes,
    known_ints,
)
from keras_towers.partition.layout import folding
from keras_towers.partition.layout.division import divide
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules import row_numbers, row_splits
from keras_towers.partition.layout.units import Units


def _global_shape(node: Node, *values: Value) -> Values:
    builder, units = node.builder, node.units
    require(not any(isinstance(value.layout, ListOf) for value in values))
    results = []
    for index, value in enumerate(values):
        entries: Any = value.sizes
        if node.type == "Rank":
            entries = value.rank
        elif node.type == "Size":
            entries = math.prod(entries)
        known, dtype = np.array(entries, object), node.output_dtype(index)
        whole = units.known_tensor(known, dtype)
        if whole is None:
            sizes = _global_sizes(units, value)
            whole = builder.size_vector(sizes, dtype)
            if node.type == "Size":
                whole = builder.op("Prod", [whole, [0]], (), True)
        results.append(Value(REPLICATED, whole=whole, known=known))
    return results


def _global_sizes(units: Units, value: Value) -> list[Tensor]:
    """Return the global sizes of a value as tensors."""
    builder = units.builder
    entries: list[Tensor] = []
    for axis, size in enumerate(value.sizes):
        entry = units.global_size(size)
        if entry is None:
            # The axis has no rows, so the size is the same on all towers.
            tensor = value.local if value.whole is None else value.whole
            assert tensor is not None
            entry = builder.axis_size(tensor, axis)
            if "towers" in entry.axes:
                entry = builder.exchange("first", entry)
        entries.append(entry)
    return entries


def requested_shape(index: int) -> Callable[..., Shape]:
    """Return a function that returns the shape given as an input."""
    return lambda node, *inputs: node.requested_shape(inputs[index])


def made_of_shape(node: Node, *inputs: Value) -> Values:
    """Make a tower's own rows, if the given shape has rows."""
    require(not any(value.sharded for value in inputs))
    sizes = asserted(node.facts.shape)(node, *inputs)
    # A number may be a coincidence.
    may_coincide = node.options.may_coincide and is_draw(node.type)
    layout = node.units.find_row_axis(sizes, may_coincide=may_coincide)
    return asserted(node.facts.rows)(node, layout, *inputs)


def _broadcast(node: Node, value: Value, target: Value) -> Values:
    sizes, (layout, _) = node.requested_shape(target), value.as_rows()
    layout = layout.at_axis(layout.axis + len(sizes) - len(value.sizes))
    # An axis with a single row may be broadcast to any size.
    require(sizes[layout.axis] == layout.size)
    return node.run_with_shape([value, target], 1, sizes, layout)


def _broadcast_rows(
    node: Node, layout: Sharded, value: Value, target: Value
) -> Values:
    sizes = node.requested_shape(target)
    axis = layout.axis - len(sizes) + len(value.sizes)
    if axis >= 0 and value.sizes[axis] != 1:
        own = layout.at_axis(axis)
        value = Value(own, node.converter.shard(value, own))
    return node.run_with_shape([value, target], 1, sizes, layout)


def _fill_rows(
    node: Node, layout: Sharded, target: Value, value: Value
) -> Values:
    sizes = node.requested_shape(target)
    return node.run_with_shape([target, value], 0, sizes, layout)


def _range_shape(node: Node, start: Value, end: Value, step: Value) -> Shape:
    """Derive the length of a range whose end is a multiple of its step."""
    require(start.number == 0 and step.number != 0)
    count = end.number // step.number
    require(isinstance(count, (int, Size)))
    require(count * step.number == end.number)
    return (count,)


def _reshape_shape(node: Node, value: Value, target: Value) -> Shape:
    """Derive the one unknown size of a reshape from the number of entries."""
    sizes = list(node.requested_shape(target))
    if sizes.count(UNKNOWN) != 1 or value.shape is None:
        return tuple(sizes)
    unknown = sizes.index(UNKNOWN)
    rest = math.prod(sizes[:unknown] + sizes[unknown + 1 :])
    if isinstance(rest, Size) or rest:
        sizes[unknown] = math.prod(value.shape) // rest
    return tuple(sizes)


def _reshape(node: Node, value: Value, target: Value) -> Values:
    sizes = _reshape_shape(node, value, target)
    if value.is_partial:
        factors = Factors([None, None], [[None] * len(sizes)], linear=[[0]])
        return divide(node, [value, target], factors)
    before, _ = value.as_rows()
    layout = _rows_after(node.units, before, value.sizes, sizes)
    return node.run_with_shape([value, target], 1, sizes, layout)


def _reshape_rows(
    node: Node, layout: Sharded, value: Value, target: Value
) -> Values:
    """Reshape the local rows, if the result has rows as well."""
    sizes = _reshape_shape(node, value, target)
    before = _rows_after(node.units, layout, sizes, value.sizes)
    rows = Value(before, node.converter.shard(value, before))
    return node.run_with_shape([rows, target], 1, sizes, layout)


def _rows_after(
    units: Units, layout: Sharded, shape: Shape, sizes: Shape
) -> Sharded:
    """Return the layout after a reshape.

    The flat index of an entry is (leading, unit, trailing). The leading index
    covers earlier axes and the blocks, and the trailing index covers the rows
    of a unit and later axes.
    """
    unit, parts = units.whole_unit(layout.unit)
    leading = math.prod(shape[: layout.axis]) * layout.blocks
    trailing = math.prod(shape[layout.axis + 1 :]) * layout.rows * parts
    for axis, size in enumerate(sizes):
        count, before = size // unit.size, math.prod(sizes[:axis])
        if size % unit.size != 0:
            continue
        blocks = leading // before if count and before != 0 else None
        if not isinstance(blocks, int) or not blocks or count % blocks:
            continue
        rows = count // blocks
        after = math.prod(sizes[axis + 1 :]) * rows
        # The number of entries stays the same, so that sizes which are known
        # only when the step runs are equal if all others are.
        varies = not isinstance(after, int) or not isinstance(trailing, int)
        if after == trailing or (varies and blocks * before == leading):
            return units.rows_of(axis, unit, blocks, rows)
    raise NotDivided


def _tile_axes(node: Node, value: Value, times: Value) -> Factors:
    known = [UNKNOWN] * value.rank if times.known is None else times.known
    labels: list[Hashable] = []
    tiled: list[Hashable] = []
    for axis, size in enumerate(value.sizes):
        is_kept = known[axis] == 1
        labels.append(axis if is_kept else None)
        tiled.append(axis if is_kept else NewAxis(size * known[axis]))
    # A partial sum is added up before it is larger.
    return Factors([labels], [tiled])


def _tile(node: Node, value: Value, times: Value) -> Values:
    """Tile a replicated value to rows."""
    require(value.sharded is None)
    (sizes,) = _tile_axes(node, value, times).shapes([value, times])
    for axis, size in enumerate(asserted(sizes)):
        layout = node.units.find_rows(axis, size)
        if layout is not None and value.sizes[axis] == 1:
            return _tile_rows(node, layout, value, times)
    raise NotDivided


def _tile_rows(
    node: Node, layout: Sharded, value: Value, times: Value
) -> Values:
    require(value.sizes[layout.axis] == 1)
    converter = node.converter
    shapes = _tile_axes(node, value, times).shapes([value, times])
    shape = converter.local_target(times, times.entries, layout)
    operands = [converter.replicate(value), shape]
    return node.run_on_towers(operands, layout, shapes=shapes)


def _concat_shape(node: Node, *values: Value) -> Shape:
    *parts, axis_value = values
    (axis,) = known_axes(axis_value, parts[0].rank)
    sizes = [
        next((size for size in each if size is not UNKNOWN), UNKNOWN)
        for each in zip(*(part.sizes for part in parts), strict=True)
    ]
    sizes[axis] = sum(part.sizes[axis] for part in parts)
    return tuple(sizes)


def like_first(node: Node, value: Value, *rest: Value) -> Shape:
    """Return the shape of the first input."""
    return value.sizes


# ---- axes --------------------------------------------------------------------


def _note_size_of_places(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that indices into unique values are less than their number."""
    outputs[1].shape = inputs[0].sizes


def _transpose(node: Node, value: Value, order: Value) -> Factors:
    return Factors([range(value.rank)], [known_ints(order)], linear=[[0]])


def _with_axis(value: Value, at: int, label: Hashable) -> list[Hashable]:
    """Return the labels of a value's axes, with another axis inserted."""
    labels: list[Hashable] = list(range(value.rank))
    labels.insert(at % (value.rank + 1), label)
    return labels


def _expand_dims(node: Node, value: Value, at: Value) -> Factors:
    labels = _with_axis(value, known_ints(at)[0], NewAxis(1))
    return Factors([range(value.rank)], [labels], linear=[[0]])


def _pack(node: Node, *values: Value) -> Factors:
    labels, count = range(values[0].rank), len(values)
    output = _with_axis(values[0], node.attr("axis"), NewAxis(count))
    return Factors([labels] * count, [output], linear=[range(count)])


def _one_hot(node: Node, indices: Value, *options: Value) -> Factors:
    depth = NewAxis(options[0].number)
    output = _with_axis(indices, node.attr("axis"), depth)
    return Factors([range(indices.rank)], [output])


def _squeeze_nothing(node: Node, value: Value) -> Values:
    require(not _squeezed(node, value))
    return [value]


def _squeeze(node: Node, value: Value) -> Factors:
    reduced = _squeezed(node, value)
    factors = along_axes(reduced, [value], 1, [[0]], keeps=False)
    # A tower may have one row, whose axis it keeps.
    dims = {"squeeze_dims": sorted(reduced)}
    return dataclasses.replace(factors, attributes=dims)


def _squeezed(node: Node, value: Value) -> set[int]:
    """Return the axes of size 1 that an operation drops."""
    named = {axis % value.rank for axis in node.attr("squeeze_dims")}
    if named:
        return named
    # It drops all axes of size 1, which may be one of unknown size.
    require(all(isinstance(size, int) for size in value.sizes))
    return {axis for axis, size in enumerate(value.sizes) if size == 1}


def _unpack(node: Node, value: Value) -> Factors:
    reduced = [node.attr("axis") % value.rank]
    return along_axes(reduced, [value], node.num_outputs, [[0]], keeps=False)


def _reverse(node: Node, *inputs: Value) -> Factors:
    return along_axes(known_axes(inputs[-1], inputs[0].rank), inputs, 1, [[0]])


def _reverse_sequence(node: Node, value: Value, lengths: Value) -> Factors:
    seq_dim, batch_dim = node.attr("seq_dim"), node.attr("batch_dim")
    labels = [None if a == seq_dim else a for a in range(value.rank)]
    return Factors([labels, [batch_dim]], [labels], linear=[[0]])


def _concat_axes(node: Node, *values: Value) -> Factors:
    reduced, count = known_axes(values[-1], values[0].rank), len(values) - 1
    labels = [None if a in reduced else a for a in range(values[0].rank)]
    return Factors([labels] * count, [labels], linear=[range(count)])


def _concat(node: Node, *values: Value) -> Values:
    """Concatenate the rows of several tensors as blocks of rows."""
    *parts, axis = values
    layouts = [part.sharded for part in parts if part.sharded is not None]
    like = {dataclasses.replace(layout, blocks=1) for layout in layouts}
    require(len(like) == 1)
    (one,), shape = like, list(parts[0].sizes)
    require(known_axes(axis, len(shape)) == [one.axis])
    layouts = [part.sharded or one for part in parts]
    operands = map(node.converter.shard, parts, layouts)
    blocks = sum(layout.blocks for layout in layouts)
    joined = dataclasses.replace(one, blocks=blocks)
    shape[joined.axis] = joined.size
    inputs = [*operands, node.converter.replicate(axis)]
    return node.run_on_towers(inputs, joined, shapes=[shape])


# ---- what is known of them ---------------------------------------------------

# fmt: off
operation("Shape ShapeN Size Rank", _global_shape, work="picked")
operation("BroadcastArgs",
    fold=lambda node, *shapes: np.array(broadcast(*shapes), object))
operation("BroadcastGradientArgs", fold=folding.broadcast_over)
operation("ConcatOffset", fold=folding.offsets)
operation("ListDiff", fold=folding.list_diff)
operation("Reshape", _reshape, rows=_reshape_rows, shape=_reshape_shape,
    notes=[row_numbers.note_moved],
    fold=lambda node, array, shape: array.reshape(folding.to_ints(shape)),
    bounds="inputs", memory="input")
operation("ExpandDims", labels=_expand_dims, notes=[row_numbers.note_moved],
    fold=lambda node, array, axis: np.expand_dims(array, folding.to_int(axis)),
    bounds="inputs", memory="input")
operation("Squeeze", _squeeze_nothing, labels=_squeeze,
    notes=[row_numbers.note_moved], fold=folding.squeezed, bounds="inputs",
    memory="input")
operation("Transpose", labels=_transpose, notes=[row_numbers.note_moved],
    fold=lambda node, array, order: array.transpose(folding.to_ints(order)),
    bounds="inputs", entry_work=96)
operation("ConjugateTranspose", labels=_transpose, entry_work=96)
operation("BroadcastTo", _broadcast, made_of_shape, rows=_broadcast_rows,
    shape=requested_shape(1), notes=[row_numbers.note_moved], bounds="inputs")
operation("Fill", made_of_shape, rows=_fill_rows, shape=requested_shape(0),
    fold=folding.filled, bounds="inputs")
operation("Tile", _tile, labels=_tile_axes, rows=_tile_rows,
    notes=[row_numbers.note_moved], fold=folding.tiled, bounds="inputs")
operation("Pack", labels=_pack, notes=[row_numbers.note_joined],
    fold=lambda node, *arrays: np.stack(arrays, node.attr("axis")),
    bounds="inputs")
operation("Unpack", labels=_unpack, notes=[row_numbers.note_taken],
    fold=lambda node, array: [*np.moveaxis(array, node.attr("axis"), 0)])
operation("ConcatV2", _concat, labels=_concat_axes, shape=_concat_shape,
    notes=[row_numbers.note_joined, row_splits.note_row_splits],
    fold=folding.joined, bounds="inputs")
operation("OneHot", labels=_one_hot, bounds="inputs")
operation("ReverseV2 Roll", labels=_reverse)
operation("ReverseSequence", labels=_reverse_sequence, shape=like_first)
operation("RandomShuffle", shape=like_first)
operation("InvertPermutation", shape=like_first, fold=folding.inverted)
operation("Range", shape=_range_shape,
    notes=[row_numbers.note_range, row_splits.note_even_splits],
    fold=folding.ranged)
operation("Unique UniqueWithCounts", notes=[_note_size_of_places])
