"""Sparse rows: where they have entries, the entries, and their shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Layout,
    Places,
    Sharded,
    SparseIndices,
    SparseShape,
    Value,
)
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import (
    SIZE,
    Partitioner,
    local_shape,
    static,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import by_places
from keras_towers.partition.rules.places import (
    first_size,
    indexed,
    indices_of,
)
from keras_towers.partition.sizes import UNKNOWN

# ---- inputs ------------------------------------------------------------------


def indices(
    partition: Partitioner, own: Tensor, layout: SparseIndices
) -> Value:
    """Return the indices of sparse rows that a program is given."""
    unit = partition.found_unit(layout.unit, first_size(partition, own))
    rank = own.shape[1]
    rows, of = Sharded(0, unit), Sharded(0, partition.unit)
    return indices_of(partition, own, rows, of, rank)


def shape(partition: Partitioner, own: Tensor, layout: SparseShape) -> Value:
    """Return the shape of sparse rows that a program is given."""
    build, rank = partition.builder, 1 + len(layout.sizes)
    begin, rest = build.constant([1], SIZE), build.constant([rank - 1], SIZE)
    behind = build.op("Slice", [own, begin, rest], (rank - 1,))
    # Behind the first, all towers have the same sizes.
    behind = build.exchange("first", behind)
    ahead = partition.vector([partition.unit.total], SIZE)
    along = build.constant(0, "int32")
    whole = build.op("ConcatV2", [ahead, behind, along], (rank,))
    known = np.empty(rank, object)
    sizes = [UNKNOWN if size is None else size for size in layout.sizes]
    known[:] = [partition.unit.size, *sizes]
    return Value(REPLICATED, whole=whole, shape=(rank,), known=known)


# ---- operations --------------------------------------------------------------


def _rows(
    partition: Partitioner, at: Value, entries: Value, target: Value
) -> tuple[Places, Tensor, list[Any]] | None:
    """The indices, entries and sizes of a matrix that has own rows."""
    found = indexed(at)
    own = None if found is None else partition.rows(entries, found.layout)
    if found is None or own is None or target.known is None:
        return None
    if target.known[0] is UNKNOWN or target.known[0] != found.target.size:
        return None
    sizes = [None if size is UNKNOWN else size for size in target.known]
    return found, own, sizes


@by_places("SparseTensorDenseMatMul")
def _product(
    partition: Partitioner,
    node: Node,
    at: Value,
    entries: Value,
    target: Value,
    factor: Value,
) -> list[Value] | None:
    rows = _rows(partition, at, entries, target)
    if rows is None or factor.shape is None:
        return None
    found, own, sizes = rows
    turned = node.attr("adjoint_b")
    layout = found.target
    local_target = partition.local_target(target, sizes, layout)
    width = factor.shape[0 if turned else 1]
    if node.attr("adjoint_a"):
        # Each row of the matrix meets one of the factor.
        own_factor = partition.rows(factor, layout.along(int(turned)))
        result: Layout = PARTIAL
        size = (sizes[1], width)
    else:
        own_factor = partition.local(factor)
        result, size = layout, (layout.size, width)
    if own_factor is None:
        return None
    (local,) = partition.builder.copy(
        node.operation,
        [found.own, own, local_target, own_factor],
        [local_shape(static(size), result)],
    )
    return [Value(result, local, shape=size)]


@by_places("SparseToDense")
def _dense(
    partition: Partitioner,
    node: Node,
    at: Value,
    target: Value,
    entries: Value,
    default: Value,
) -> list[Value] | None:
    rows = _rows(partition, at, entries, target)
    if rows is None:
        return None
    found, own, sizes = rows
    layout = found.target
    local_target = partition.local_target(target, sizes, layout)
    (local,) = partition.builder.copy(
        node.operation,
        [found.own, local_target, own, partition.local(default)],
        [local_shape(static(sizes), layout)],
    )
    return [Value(layout, local, shape=tuple(sizes))]


@by_places("SparseReorder")
def _ordered(
    partition: Partitioner, node: Node, at: Value, entries: Value, target: Value
) -> list[Value] | None:
    """Rows stay in order, and so do the towers."""
    rows = _rows(partition, at, entries, target)
    if rows is None:
        return None
    found, own, sizes = rows
    layout, of = found.layout, found.target
    places, values = partition.builder.copy(
        node.operation,
        [found.own, own, partition.local_target(target, sizes, of)],
        [local_shape(size, layout) for size in node.shapes],
    )
    numbers = indices_of(partition, places, layout, of, len(sizes))
    return [numbers, Value(layout, values, shape=entries.shape)]
