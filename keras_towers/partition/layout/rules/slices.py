"""Slices, splits and padding.

A slice of an axis of rows may select whole blocks: for rows in blocks of views,
the rows of a single view. Every tower selects them from its own examples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from keras_towers.partition.ir.builder import Builder, static
from keras_towers.partition.ir.layouts import Sharded, local_shape
from keras_towers.partition.ir.reasons import asserted, require
from keras_towers.partition.ir.registry import Factors, NewAxis, operation
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension
from keras_towers.partition.ir.values import Value, Values, known_axes
from keras_towers.partition.layout import folding
from keras_towers.partition.layout.division import divide
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules import row_numbers, row_splits
from keras_towers.partition.layout.rules.shapes import requested_shape
from keras_towers.partition.layout.spans import Span, spans, split_sizes
from keras_towers.partition.layout.units import Units


def _known_spans(
    node: Node, shape: Sequence[Dimension], ends: Values
) -> list[Span]:
    """Return the spans of a slice, as far as they are known."""
    return spans(node, shape, *[end.entries for end in ends])


def _labels(
    taken: Sequence[Span], rank: int
) -> tuple[list[Hashable], list[Hashable]]:
    """Return the labels of input and output, of the axes that stay whole."""
    whole: list[Hashable] = [None] * rank
    left: list[Hashable] = []
    for span in taken:
        if span.axis is not None and span.is_whole:
            whole[span.axis] = span.axis
            left.append(span.axis)
        elif span.axis is None:
            left.append(NewAxis(1))
        elif not span.dropped:
            # Every n-th row does not select whole units.
            size = UNKNOWN if span.size is None else span.size
            left.append(NewAxis(size if span.stride == 1 else UNKNOWN))
    return whole, left


def _slice_axes(node: Node, value: Value, *ends: Value) -> Factors:
    taken = _known_spans(node, value.sizes, ends)
    whole, left = _labels(taken, value.rank)
    entries = {}
    if node.type == "Slice":
        # The entry may be the global number of rows. Those that are known tell
        # TensorFlow the shape, which some operations have to know.
        entries[2] = [
            -1
            if span.is_whole
            else span.size
            if isinstance(span.size, int)
            else None
            for span in taken
        ]
    return Factors([whole], [left], linear=[[0]], entries=entries)


def _slice_rows(node: Node, value: Value, *ends: Value) -> Values:
    layout, _ = value.as_rows()
    span = _only_partial_span(
        _known_spans(node, value.sizes, ends), layout.axis
    )
    size: Any = span.size
    return [_slice_blocks(node.units, value, span.begin, size)]


def _slice_from_unknown(
    node: Node, value: Value, begin: Value, size: Value
) -> Values:
    """Slice axes other than the rows' one, from indices not known yet.

    XLA then needs the local number of rows.
    """
    layout, tensor = value.as_rows()
    taken = _known_spans(node, value.sizes, (begin, size))
    require(begin.entries.count(UNKNOWN) and taken[layout.axis].is_whole)
    shape: list[Any] = [
        full if span.is_whole else span.size
        for full, span in zip(value.sizes, taken, strict=True)
    ]
    own: list[Any] = [size if isinstance(size, int) else None for size in shape]
    own[layout.axis] = node.units.local_rows(layout)
    operands = [
        tensor,
        node.converter.replicate(begin),
        node.converter.size_vector_like(size, own),
    ]
    return node.run_on_towers(operands, layout, shapes=[shape])


def _only_partial_span(taken: Sequence[Span], axis: int) -> Span:
    """Return the span of an axis, if all other axes stay whole."""
    parts = [span for span in taken if not span.is_whole]
    require(len(parts) == 1 and parts[0].axis == axis)
    require(not parts[0].dropped and parts[0].stride == 1)
    return parts[0]


def _slice_blocks(
    units: Units, value: Value, begin: Dimension, size: Dimension
) -> Value:
    """Slice whole blocks from blocks of rows."""
    builder = units.builder
    (layout, tensor), shape = value.as_rows(), list(value.sizes)
    part = _with_blocks(layout, size)
    offset = _rows_ahead(layout, begin)
    first = offset and builder.scaled_size(offset, layout.unit.count)
    count = units.local_rows(part)
    local = builder.slice_rows(tensor, shape, layout.axis, first, count)
    shape[layout.axis] = part.size
    return Value(part, local, shape=tuple(shape))


def _with_blocks(layout: Sharded, size: Dimension) -> Sharded:
    """Return the layout of another size, with equally large blocks."""
    rows = layout.rows_per_unit_in(size)
    require(rows and not rows % layout.rows)
    return dataclasses.replace(layout, blocks=asserted(rows) // layout.rows)


def _rows_ahead(layout: Sharded, begin: Dimension) -> int:
    """Return how many rows of each unit come before an index."""
    return 0 if begin == 0 else _with_blocks(layout, begin).rows_per_unit


def _split_operand(node: Node, inputs: Values) -> tuple[int, Sequence[int]]:
    """Return the index of the split input, and the axis of the split."""
    index, axis = (1, inputs[0]) if node.type == "Split" else (0, inputs[2])
    return index, known_axes(axis, inputs[index].rank)


def _split_axes(node: Node, *inputs: Value) -> Factors:
    index, split = _split_operand(node, inputs)
    labels = [None if a in split else a for a in range(inputs[index].rank)]
    own = [*[None] * index, labels]
    return Factors(own, [labels] * node.num_outputs, linear=[[index]])


def _split_rows(node: Node, *inputs: Value) -> Values:
    """Split rows into blocks."""
    index, split = _split_operand(node, inputs)
    value, count = inputs[index], node.num_outputs
    layout, _ = value.as_rows()
    require(split == [layout.axis])
    sizes = [layout.size // count] * count
    if node.type == "SplitV":
        sizes = split_sizes(inputs[1].entries, layout.size)
    begins = itertools.accumulate(sizes[:-1], initial=0)
    return [
        _slice_blocks(node.units, value, begin, size)
        for begin, size in zip(begins, sizes, strict=True)
    ]


def _update_axes(
    node: Node, value: Value, update: Value, begin: Value
) -> Factors:
    """Label an update of slices; an axis that it replaces whole begins at 0."""
    whole = [
        axis if size == update.sizes[axis] and size is not UNKNOWN else None
        for axis, size in enumerate(value.sizes)
    ]
    left = [
        NewAxis(size) if axis is None else axis
        for axis, size in zip(whole, value.sizes, strict=True)
    ]
    return Factors([whole, whole], [left], linear=[[0, 1]])


# ---- padding -----------------------------------------------------------------


def _slice_gradient(node: Node, target: Value, *inputs: Value) -> Values:
    *ends, value = inputs
    sizes = list(target.known_array)
    require(value.shape is not None)
    taken = _known_spans(node, sizes, ends)
    whole, left = _labels(taken, len(sizes))
    if value.sharded is None:
        factors = Factors([*[None] * 4, left], [whole], linear=[[4]])
        return divide(node, [target, *inputs], factors)
    layout = value.sharded
    axis = left[layout.axis]
    if not isinstance(axis, int) or sizes[axis] != layout.size:
        span = _only_partial_span(taken, layout.axis)
        return [
            _pad_blocks(node.builder, value, span.begin, sizes[layout.axis])
        ]
    require(not any(end.sharded for end in ends))
    operands = [target, *inputs]
    return node.run_with_shape(operands, 0, sizes, layout.at_axis(axis))


def _pad_blocks(
    builder: Builder, value: Value, begin: Dimension, size: Dimension
) -> Value:
    """Pad blocks of rows with blocks of zeros."""
    (layout, tensor), shape = value.as_rows(), list(value.sizes)
    padded, before = _with_blocks(layout, size), _rows_ahead(layout, begin)
    after = padded.rows_per_unit - before - layout.rows_per_unit
    first, last = (
        rows and builder.scaled_size(rows, layout.unit.count)
        for rows in (before, after)
    )
    shape[layout.axis] = padded.size
    own_shape = local_shape(static(shape), padded)
    local = builder.pad_axis(tensor, layout.axis, first, last, own_shape)
    return Value(padded, local, shape=tuple(shape))


def _pad_axes(node: Node, value: Value, widths: Value, *fill: Value) -> Factors:
    known = widths.known_array
    sign = -1 if node.type == "MirrorPadGrad" else 1
    labels: list[Hashable] = []
    padded: list[Hashable] = []
    for axis, size in enumerate(value.sizes):
        width = sum(known[axis])
        is_kept = all(end == 0 for end in known[axis])
        labels.append(axis if is_kept else None)
        padded.append(axis if is_kept else NewAxis(size + sign * width))
    return Factors(
        [labels],
        [padded],
        linear=() if fill else [[0]],
        needs_rows=node.type.startswith("Mirror"),
    )


def _pad(node: Node, value: Value, widths: Value) -> Values:
    (layout, _), known = value.as_rows(), widths.known_array
    padded = [axis for axis, pair in enumerate(known) if any(pair != 0)]
    require(padded == [layout.axis])
    before, after = known[layout.axis]
    size = value.sizes[layout.axis] + before + after
    return [_pad_blocks(node.builder, value, before, size)]


# ---- what is known of them ---------------------------------------------------

# fmt: off
operation("StridedSlice", _slice_rows, labels=_slice_axes,
    notes=[row_numbers.note_taken, row_splits.note_part_of_splits],
    fold=folding.sliced, bounds="inputs", work="picked")
operation("Slice", _slice_rows, _slice_from_unknown, labels=_slice_axes,
    notes=[row_numbers.note_taken], fold=folding.sliced, bounds="inputs",
    work="picked")
operation("StridedSliceGrad", _slice_gradient, shape=requested_shape(0))
operation("Split", _split_rows, labels=_split_axes, fold=folding.split_evenly)
operation("SplitV", _split_rows, labels=_split_axes, fold=folding.split)
operation("XlaDynamicUpdateSlice", labels=_update_axes)
operation("Pad", _pad, labels=_pad_axes)
operation("PadV2 MirrorPad MirrorPadGrad", labels=_pad_axes)
