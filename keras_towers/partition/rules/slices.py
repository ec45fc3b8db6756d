"""Operations that take a part of axes, or put it back among zeros.

Of an axis of rows whole blocks may be taken: of rows that are [views, examples]
those of one view. Each tower takes those of its own examples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

from keras_towers.partition.division import divided
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import (
    NotDivided,
    Shape,
    Sharded,
    Value,
    Values,
    local_shape,
    require,
    static,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import Node, axes, rule, shape_of
from keras_towers.partition.rules.reductions import axes_of
from keras_towers.partition.sizes import UNKNOWN
from keras_towers.partition.slice_spans import Span, spans


def _spans(node: Node, shape: Sequence[Any], ends: Values) -> list[Span]:
    """What a slice takes of each axis."""
    return spans(node, shape, *map(_entries, ends))


def _entries(value: Value) -> Sequence[Any]:
    """What is known of the ends of a slice."""
    if value.known is not None:
        return cast("Sequence[Any]", value.known)
    (count,) = value.sizes
    require(isinstance(count, int))
    return [UNKNOWN] * count


def _labels(taken: Sequence[Span], rank: int) -> tuple[list[Any], list[Any]]:
    """Labels of what is sliced and of the slice: axes that are taken whole."""
    whole: list[Any] = [None] * rank
    left: list[Any] = []
    for span in taken:
        label = span.axis if span.is_whole else None
        if label is not None:
            whole[label] = label
        if not span.dropped:
            left.append(label)
    return whole, left


@axes("StridedSlice", "Slice")
def _sliced_axes(node: Node, value: Value, *ends: Value) -> Factors:
    taken = _spans(node, value.sizes, ends)
    whole, left = _labels(taken, value.rank)
    entries = {}
    if node.type == "Slice":
        # It may name the number of rows that one device has.
        entries[2] = [-1 if span.is_whole else None for span in taken]
    return Factors([whole, *[None] * len(ends)], [left], [[0]], entries=entries)


@shape_of("StridedSlice", "Slice")
def _shape(node: Node, value: Value, *ends: Value) -> Shape:
    sizes: list[Any] = []
    for span in _spans(node, value.sizes, ends):
        size: Any = 1
        if span.axis is not None:
            whole = value.sizes[span.axis]
            size = whole if span.size is None else span.size
        if span.stride != 1:
            # Rows of which every so many were taken are no rows of a unit.
            size = UNKNOWN
        if not span.dropped:
            sizes.append(size)
    return tuple(sizes)


@rule("StridedSlice", "Slice")
def _sliced(node: Node, value: Value, *ends: Value) -> Values:
    layout, _ = value.as_rows()
    span = _part_of(_spans(node, value.sizes, ends), layout.axis)
    return [_blocks(node.partition, value, span.begin, span.size)]


def _part_of(taken: Sequence[Span], axis: int) -> Span:
    """The part of an axis that is taken, if all others are taken whole."""
    parts = [span for span in taken if not span.is_whole]
    require(len(parts) == 1 and parts[0].axis == axis)
    require(not parts[0].dropped and parts[0].stride == 1)
    return parts[0]


def _blocks(
    partition: Partitioner, value: Value, begin: Any, size: Any
) -> Value:
    """Some blocks of the rows of a tensor."""
    (layout, tensor), shape = value.as_rows(), list(value.sizes)
    part = _with_blocks(layout, size)
    ahead = _rows_ahead(layout, begin)
    rows = partition.times(part.count, layout.unit.count)
    local = partition.sliced(
        tensor,
        shape,
        layout.axis,
        ahead and partition.times(ahead, layout.unit.count),
        rows,
    )
    shape[layout.axis] = part.size
    return Value(part, local, shape=tuple(shape))


def _with_blocks(layout: Sharded, size: Any) -> Sharded:
    """The layout of an axis of another size, which has as large blocks."""
    blocks = layout.blocks_in(size)
    if not blocks:
        raise NotDivided
    return dataclasses.replace(layout, blocks=blocks)


def _rows_ahead(layout: Sharded, begin: Any) -> int:
    """How many rows of each unit are ahead of a block that begins there."""
    return 0 if begin == 0 else _with_blocks(layout, begin).count


def _split_given(node: Node, inputs: Values) -> tuple[int, Sequence[int]]:
    """Which input is split, and along which axis."""
    at, over = (1, inputs[0]) if node.type == "Split" else (0, inputs[2])
    return at, axes_of(over, inputs[at].rank)


@axes("Split", "SplitV")
def _split_axes(node: Node, *inputs: Value) -> Factors:
    at, gone = _split_given(node, inputs)
    labels = [None if a in gone else a for a in range(inputs[at].rank)]
    given = [labels if k == at else None for k in range(len(inputs))]
    return Factors(given, [labels] * node.num_outputs, [[at]])


@rule("Split", "SplitV")
def _split(node: Node, *inputs: Value) -> Values:
    """Blocks of rows become rows."""
    at, gone = _split_given(node, inputs)
    (layout, _), count = inputs[at].as_rows(), node.num_outputs
    require(gone == [layout.axis])
    sizes = [layout.size // count] * count if at else _entries(inputs[1])
    begins = itertools.accumulate(sizes, initial=0)
    return [
        _blocks(node.partition, inputs[at], begin, size)
        for begin, size in zip(begins, sizes, strict=False)
    ]


# ---- among zeros -------------------------------------------------------------


@rule("StridedSliceGrad")
def _strided_gradient(node: Node, target: Value, *inputs: Value) -> Values:
    *ends, value = inputs
    sizes = target.known
    if sizes is None or value.shape is None:
        raise NotDivided
    taken = _spans(node, sizes, ends)
    whole, left = _labels(taken, len(sizes))
    if value.sharded is None:
        factors = Factors([*[None] * 4, left], [whole], [[4]])
        return divided(node, [target, *inputs], factors)
    layout = value.sharded
    axis = left[layout.axis]
    if axis is None or sizes[axis] != layout.size:
        span = _part_of(taken, layout.axis)
        return [_padded(node.partition, value, span.begin, sizes[layout.axis])]
    given, spread = [target, *inputs], layout.along(axis)
    return node.of_shape(given, 0, sizes, spread)


def _padded(
    partition: Partitioner, value: Value, begin: Any, size: Any
) -> Value:
    """Blocks of rows among blocks of zeros."""
    (layout, tensor), shape = value.as_rows(), list(value.sizes)
    padded, ahead = _with_blocks(layout, size), _rows_ahead(layout, begin)
    behind = padded.count - ahead - layout.count
    axis, rank = layout.axis, len(shape)
    ends = [
        partition.along(
            axis, rank, rows and partition.times(rows, layout.unit.count), 0
        )
        for rows in (ahead, behind)
    ]
    widths = partition.op("Pack", ends, (rank, 2), axis=1)
    shape[axis] = padded.size
    local = partition.op(
        "Pad", [tensor, widths], local_shape(static(shape), padded)
    )
    return Value(padded, local, shape=tuple(shape))


@axes("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad_axes(node: Node, value: Value, widths: Value, *fill: Value) -> Factors:
    require(widths.known is not None)
    labels = [
        axis if all(width == 0 for width in widths.known[axis]) else None
        for axis in range(value.rank)
    ]
    return Factors(
        [labels, None, *[None] * len(fill)],
        [labels],
        () if fill else [[0]],
        needs_rows=node.type.startswith("Mirror"),
    )


@rule("Pad")
def _pad(node: Node, value: Value, widths: Value) -> Values:
    (layout, _), known = value.as_rows(), widths.known
    require(known is not None)
    padded = [axis for axis, pair in enumerate(known) if any(pair != 0)]
    require(padded == [layout.axis])
    before, behind = known[layout.axis]
    size = value.sizes[layout.axis] + before + behind
    return [_padded(node.partition, value, before, size)]
