"""Shapes and sizes, and what makes tensors of a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.partition.conversions import SIZE, local_shape, static
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    Shape,
    Sharded,
    Value,
)
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import axes, rule, shape_of
from keras_towers.partition.sizes import UNKNOWN, Size


@rule("Shape", "ShapeN", "Size", "Rank", always=True)
def _sizes(
    partition: Partitioner, node: Node, *values: Value
) -> list[Value] | None:
    if any(v.shape is None or isinstance(v.layout, ListOf) for v in values):
        return None
    results = []
    for index, value in enumerate(values):
        shape = value.shape or ()
        known = np.empty(len(shape), object)
        known[:] = [UNKNOWN if size is None else size for size in shape]
        if node.type == "Size":
            known = np.asarray(math.prod(known), object)
        if node.type == "Rank":
            known = np.asarray(len(shape), object)
        whole = _vector(partition, node, value, node.output_dtype(index))
        results.append(Value(REPLICATED, whole=whole, known=known))
    return results


def _vector(
    partition: Partitioner, node: Node, value: Value, dtype: Any
) -> Tensor:
    """The sizes of a value on one device, or the number of its entries."""
    build, shape = partition.builder, value.shape or ()
    if node.type == "Rank":
        return build.constant(len(shape), dtype)
    entries: list[Tensor] = []
    measured: Tensor | None = None
    for axis, size in enumerate(shape):
        entry = partition.size(size)
        if entry is None:
            # No axis of rows, so that all have as many.
            tensor = value.local if value.whole is None else value.whole
            if measured is None:
                assert tensor is not None
                measured = build.op("Shape", [tensor], out_type=SIZE)
            entry = partition.entry(measured, axis)
            if entry.on_towers:
                entry = build.exchange("first", entry)
        entries.append(entry)
    if node.type != "Size":
        return partition.vector(entries, dtype)
    product = build.constant(1, SIZE)
    for entry in entries:
        product = build.op("Mul", [product, entry], (), is_repeated=True)
    return partition.cast(product, dtype)


def target_sizes(node: Node, target: Value) -> list[Any] | None:
    """Return the entries of a shape to make, None where they are not known."""
    output = node.shapes[0]
    if output.rank is None:
        return None
    if target.known is None:
        return list(output)
    return [
        own if size is UNKNOWN or size == -1 else size
        for size, own in zip(np.ravel(target.known), output, strict=True)
    ]


def rows_of_sizes(
    partition: Partitioner,
    sizes: list[Any],
    may_be: Sequence[bool] | None = None,
) -> Sharded | None:
    """Return where a tensor of some sizes may have rows of a unit.

    Args:
        partition: the partitioner.
        sizes: the sizes.
        may_be: which of the axes may have them; None: any.
    """
    every = [partition.rows_along(a, size) for a, size in enumerate(sizes)]
    if may_be is not None:
        # The number of channels may be a multiple of that of examples.
        kept = zip(every, may_be, strict=True)
        found = [layout for layout, may in kept if may and layout is not None]
        return next(iter(found), None)
    grown = [
        axis
        for axis, size in enumerate(sizes)
        if isinstance(size, Size) or every[axis] is not None
    ]
    return every[grown[0]] if len(grown) == 1 else None


@rule("BroadcastTo", always=True)
def _broadcast(
    partition: Partitioner, node: Node, value: Value, target: Value
) -> list[Value] | None:
    sizes, rank = target_sizes(node, target), node.rank(0)
    if sizes is None or rank is None:
        return None
    ahead, layout = len(sizes) - rank, value.sharded
    if layout is not None:
        layout = layout.along(layout.axis + ahead)
        # A single row may be repeated as often as a size says.
        if sizes[layout.axis] != layout.size:
            return None
        own = value.local
    else:
        layout = rows_of_sizes(partition, sizes)
        if layout is None:
            return None
        axis = layout.axis - ahead
        repeated = axis < 0 or (value.shape and value.shape[axis] == 1)
        own = partition.local(value)
        if not repeated:
            found = partition.rows(value, layout.along(axis))
            if found is None:
                return None
            own = found
    assert own is not None
    shape = partition.local_target(target, sizes, layout)
    (local,) = partition.builder.copy(
        node.operation, [own, shape], [local_shape(static(sizes), layout)]
    )
    return [Value(layout, local, shape=tuple(sizes))]


@rule("Fill", always=True)
def _filled(
    partition: Partitioner, node: Node, target: Value, value: Value
) -> list[Value] | None:
    sizes = target_sizes(node, target)
    layout = None if sizes is None else rows_of_sizes(partition, sizes)
    if sizes is None or layout is None:
        return None
    shape = partition.local_target(target, sizes, layout)
    given = [shape, partition.local(value)]
    (local,) = partition.builder.copy(
        node.operation, given, [local_shape(static(sizes), layout)]
    )
    return [Value(layout, local, shape=tuple(sizes))]


@shape_of("BroadcastTo", "Reshape")
def _of_target(node: Node, value: Value, target: Value) -> Shape | None:
    sizes = target_sizes(node, target)
    if sizes is None or node.type == "BroadcastTo":
        return None if sizes is None else tuple(sizes)
    return tuple(_completed(value, sizes))


@shape_of("Fill")
def _of_filled(node: Node, target: Value, value: Value) -> Shape | None:
    sizes = target_sizes(node, target)
    return None if sizes is None else tuple(sizes)


@shape_of("Range")
def _of_range(node: Node, start: Value, end: Value, step: Value):
    ends = [v.known.flat[0] for v in (start, end, step) if v.known is not None]
    if len(ends) < 3 or ends[0] != 0 or ends[2] != 1 or ends[1] is UNKNOWN:
        return None
    return (ends[1],)


def _completed(value: Value, sizes: list[Any]) -> list[Any]:
    """Find the one size of a shape that is not known by all others."""
    missing = [axis for axis, size in enumerate(sizes) if size is None]
    if len(missing) != 1 or value.shape is None or None in value.shape:
        return sizes
    whole: Any = math.prod(value.shape)
    rest: Any = math.prod(size for size in sizes if size is not None)
    if UNKNOWN in (whole, rest) or (not isinstance(rest, Size) and not rest):
        return sizes
    size = whole // rest
    (axis,) = missing
    found = None if size is UNKNOWN else size
    return [*sizes[:axis], found, *sizes[axis + 1 :]]


@rule("Reshape")
def _reshaped(
    partition: Partitioner, node: Node, value: Value, target: Value
) -> list[Value] | None:
    sizes = target_sizes(node, target)
    if value.is_partial:
        factors = Factors([None, None], [None], linear=[frozenset({0})])
        return partition.divided(node, [value, target], factors)
    layout, shape = value.sharded, value.shape
    if layout is None or sizes is None or shape is None:
        return None
    sizes = _completed(value, sizes)
    found = _rows_after(layout, shape, sizes)
    if found is None:
        return None
    local_target = partition.local_target(target, sizes, found)
    assert value.local is not None
    (local,) = partition.builder.copy(
        node.operation,
        [value.local, local_target],
        [local_shape(static(sizes), found)],
    )
    return [Value(found, local, shape=tuple(sizes))]


def _rows_after(
    layout: Sharded, shape: Shape, sizes: list[Any]
) -> Sharded | None:
    """Where the rows are in another shape of the same entries.

    An entry's place is (what is ahead, unit, what is behind): what is ahead are
    the axes before and the blocks, what is behind the rows and axes after.
    """
    ahead: Any = math.prod(
        s if s is not None else UNKNOWN for s in shape[: layout.axis]
    )
    ahead = ahead * layout.blocks
    before: Any = 1
    for axis, size in enumerate(sizes):
        count = layout.units_in(size)
        if count and before is not UNKNOWN:
            blocks = ahead // before
            if isinstance(blocks, int) and blocks and not count % blocks:
                rows = count // blocks
                behind = _behind(shape, layout.axis) * layout.rows
                if _behind(sizes, axis) * rows == behind:
                    return Sharded(axis, layout.unit, blocks, rows)
        if size is None:
            return None
        before = before * size
    return None


def _behind(shape: Any, axis: int) -> Any:
    return math.prod(UNKNOWN if s is None else s for s in shape[axis + 1 :])


@axes("ZerosLike", "OnesLike")
def _alike(node: Node, value: Value) -> Factors | None:
    labels = tuple(range(node.rank(0) or 0))
    linear = [frozenset({0})] if node.type == "ZerosLike" else []
    return Factors([labels], [labels], linear=linear)


@axes("Tile")
def _tiled_axes(node: Node, value: Value, times: Value) -> Factors | None:
    rank, known = node.rank(0), times.known
    if rank is None:
        return None
    labels = [
        axis if known is not None and known[axis] == 1 else None
        for axis in range(rank)
    ]
    return Factors([labels, None], [labels], linear=[frozenset({0})])


@rule("Tile", always=True)
def _tiled(
    partition: Partitioner, node: Node, value: Value, times: Value
) -> list[Value] | None:
    factors = _tiled_axes(node, value, times)
    sizes = _of_tiled(node, value, times)
    if factors is None or value.shape is None or sizes is None:
        return None
    repeated = [size == 1 for size in value.shape]
    layout = rows_of_sizes(partition, list(sizes), repeated)
    if value.sharded is not None or layout is None:
        return partition.divided(node, [value, times], factors)
    shape = partition.local_target(times, list(times.known), layout)
    (local,) = partition.builder.copy(
        node.operation,
        [partition.local(value), shape],
        [local_shape(static(sizes), layout)],
    )
    return [Value(layout, local, shape=tuple(sizes))]


@shape_of("Tile")
def _of_tiled(node: Node, value: Value, times: Value) -> Shape | None:
    if value.shape is None or times.known is None:
        return None
    sizes = [
        UNKNOWN if size is None else size * number
        for size, number in zip(value.shape, times.known, strict=True)
    ]
    return tuple(None if size is UNKNOWN else size for size in sizes)
