"""Operations that take a part of axes, or put it back among zeros.

Of an axis of rows whole blocks may be taken: of rows that are [views, examples]
those of one view. Each tower takes those of its own examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.conversions import SIZE, local_shape, static
from keras_towers.partition.division import divided
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Shape, Sharded, Value
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import Node, axes, rule, shape_of
from keras_towers.partition.rules.reductions import axes_of
from keras_towers.partition.sizes import UNKNOWN
from keras_towers.partition.slice_spans import Span, spans


def _spans(
    node: Node, shape: Sequence[Any] | None, ends: Sequence[Value]
) -> list[Span] | None:
    """What a slice takes of each axis; None: it is not known."""
    known = [_entries(end) for end in ends]
    if shape is None or any(entries is None for entries in known):
        return None
    if node.type.startswith("StridedSlice"):
        return spans(node, shape, *known)
    taken = []
    first, count = known
    for axis, whole in enumerate(shape):
        size = count[axis]
        if size == -1:
            size = UNKNOWN if whole is None else whole - first[axis]
        is_whole = first[axis] == 0 and size == whole
        taken.append(Span(axis) if is_whole else Span(axis, first[axis], size))
    return taken


def _entries(value: Value) -> Any:
    """What is known of the ends of a slice."""
    if value.known is not None or not value.shape:
        return value.known
    (count,) = value.shape
    return [UNKNOWN] * count if isinstance(count, int) else None


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
def _sliced_axes(node: Node, value: Value, *ends: Value) -> Factors | None:
    taken = _spans(node, value.shape, ends)
    if taken is None:
        return None
    whole, left = _labels(taken, value.rank)
    entries = {}
    if node.type == "Slice":
        # It may name the number of rows that one device has.
        entries[2] = [-1 if span.is_whole else None for span in taken]
    return Factors([whole, *[None] * len(ends)], [left], [[0]], entries=entries)


@shape_of("StridedSlice", "Slice")
def _shape(node: Node, value: Value, *ends: Value) -> Shape | None:
    taken, shape = _spans(node, value.shape, ends), value.shape
    if taken is None or shape is None:
        return None
    sizes: list[Any] = []
    for span in taken:
        size: Any = 1
        if span.axis is not None:
            size = shape[span.axis] if span.size is None else span.size
        if span.stride != 1:
            # Rows of which every so many were taken are no rows of a unit.
            size = UNKNOWN
        if not span.dropped:
            sizes.append(None if size is UNKNOWN else size)
    return tuple(sizes)


@rule("StridedSlice", "Slice")
def _sliced(
    partition: Partitioner, node: Node, value: Value, *ends: Value
) -> list[Value] | None:
    taken = _spans(node, value.shape, ends)
    if value.sharded is None or taken is None:
        return None
    span = _blocks_in(taken, value.sharded.axis)
    if span is None:
        return None
    return _blocks(partition, value, span.begin, span.size)


def _blocks_in(taken: Sequence[Span], axis: int) -> Span | None:
    """The part of an axis that is taken, if all others are taken whole."""
    parts = [span for span in taken if not span.is_whole]
    if len(parts) != 1 or parts[0].axis != axis:
        return None
    (span,) = parts
    return None if span.dropped or span.stride != 1 else span


def _blocks(
    partition: Partitioner, value: Value, begin: Any, size: Any
) -> list[Value] | None:
    """Some blocks of the rows of a tensor."""
    layout, tensor, shape = value.sharded, value.local, list(value.shape or ())
    if layout is None or tensor is None:
        return None
    first, count = _rows_of_blocks(layout, begin), layout.blocks_in(size)
    if first is None or not count:
        return None
    part = dataclasses.replace(layout, blocks=count)
    units = layout.unit.count
    ahead = _times_or_zero(partition, first, units)
    rows = partition.times(part.count, units)
    local = partition.sliced(tensor, shape, layout.axis, ahead, rows)
    shape[layout.axis] = part.size
    return [Value(part, local, shape=tuple(shape))]


def _rows_of_blocks(layout: Sharded, begin: Any) -> int | None:
    """How many rows of each unit are ahead of a block, if one begins there."""
    blocks = 0 if begin == 0 else layout.blocks_in(begin)
    return None if blocks is None else blocks * layout.rows


def _times_or_zero(partition: Partitioner, number: int, units: Any) -> Any:
    if number:
        return partition.times(number, units)
    return partition.builder.constant(0, SIZE)


@axes("Split", "SplitV")
def _split_axes(node: Node, *inputs: Value) -> Factors | None:
    at, over = (1, inputs[0]) if node.type == "Split" else (0, inputs[2])
    gone = axes_of(over, inputs[at].rank)
    if gone is None:
        return None
    labels = [None if a in gone else a for a in range(inputs[at].rank)]
    given = [labels if k == at else None for k in range(len(inputs))]
    return Factors(given, [labels] * node.num_outputs, [[at]])


@rule("Split", "SplitV")
def _split(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """Blocks of rows become rows."""
    at, over = (1, inputs[0]) if node.type == "Split" else (0, inputs[2])
    value, count = inputs[at], node.num_outputs
    layout = value.sharded
    if layout is None or axes_of(over, value.rank) != [layout.axis]:
        return None
    sizes = [layout.size // count] * count if at else _entries(inputs[1])
    if sizes is None:
        return None
    results: list[Value] = []
    begin: Any = 0
    for size in sizes:
        part = _blocks(partition, value, begin, size)
        if part is None:
            return None
        results += part
        begin = begin + size
    return results


# ---- among zeros -------------------------------------------------------------


@rule("StridedSliceGrad")
def _strided_gradient(
    partition: Partitioner, node: Node, target: Value, *inputs: Value
) -> list[Value] | None:
    *ends, value = inputs
    if target.known is None or value.shape is None:
        return None
    sizes = [None if size is UNKNOWN else size for size in target.known]
    taken, layout = _spans(node, sizes, ends), value.sharded
    if taken is None:
        return None
    whole, left = _labels(taken, len(sizes))
    if layout is None:
        factors = Factors([*[None] * 4, left], [whole], [[4]])
        return divided(partition, node, [target, *inputs], factors)
    axis = left[layout.axis]
    if axis is None or sizes[axis] != layout.size:
        span = _blocks_in(taken, layout.axis)
        if span is None:
            return None
        return _padded(partition, value, span.begin, sizes[layout.axis])
    assert value.local is not None
    spread = layout.along(axis)
    local_target = partition.local_target(target, sizes, spread)
    operands = [local_target, *map(partition.replicated, ends), value.local]
    return partition.on_towers(node, operands, spread, shapes=[sizes])


def _padded(
    partition: Partitioner, value: Value, begin: Any, size: Any
) -> list[Value] | None:
    """Blocks of rows among blocks of zeros."""
    layout, tensor, shape = value.sharded, value.local, list(value.shape or ())
    if layout is None or tensor is None:
        return None
    first, blocks = _rows_of_blocks(layout, begin), layout.blocks_in(size)
    if first is None or not blocks:
        return None
    padded = dataclasses.replace(layout, blocks=blocks)
    rest = padded.count - first - layout.count
    build, axis, rank = partition.builder, layout.axis, len(shape)
    ends = [
        partition.along(
            axis, rank, _times_or_zero(partition, rows, layout.unit.count), 0
        )
        for rows in (first, rest)
    ]
    widths = build.op("Pack", ends, (rank, 2), axis=1)
    shape[axis] = padded.size
    local = build.op(
        "Pad", [tensor, widths], local_shape(static(shape), padded)
    )
    return [Value(padded, local, shape=tuple(shape))]


@axes("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad_axes(
    node: Node, value: Value, widths: Value, *fill: Value
) -> Factors | None:
    if widths.known is None:
        return None
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
def _pad(
    partition: Partitioner, node: Node, value: Value, widths: Value
) -> list[Value] | None:
    layout, shape, known = value.sharded, value.shape, widths.known
    if layout is None or shape is None or known is None:
        return None
    padded = [axis for axis, pair in enumerate(known) if any(pair != 0)]
    if padded != [layout.axis]:
        return None
    before, behind = known[layout.axis]
    size = shape[layout.axis] + before + behind
    return _padded(partition, value, before, size)
