"""Sparse rows: where they have entries, the entries, and their shape."""

from __future__ import annotations

from typing import cast

import numpy as np

from keras_towers.partition.conversions import SIZE
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Sharded,
    SparseIndices,
    SparseShape,
    Value,
)
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import by_places
from keras_towers.partition.rules.addresses import Role, addressed
from keras_towers.partition.rules.places import (
    first_size,
    indices_of,
)
from keras_towers.partition.sizes import UNKNOWN

# ---- inputs ------------------------------------------------------------------


def indices(
    partition: Partitioner, own: Tensor, layout: SparseIndices
) -> Value:
    """Return the indices of sparse rows that a program is given."""
    unit = partition.found_unit(layout.unit, first_size(partition, own))
    rank = int(own.shape[1] or 0)
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

_MATRIX: tuple[Role, ...] = ("indices", "entries", "shape")


@by_places("SparseTensorDenseMatMul")
def _product(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """The product of a matrix that has own rows."""
    found = addressed(partition, inputs[:3], _MATRIX)
    if found is None:
        return None
    (places, given), factor = found, inputs[3]
    if not node.attr("adjoint_a"):
        given.append(partition.local(factor))
        return partition.computed_by_towers(node, given, places.target)
    # Each row of the matrix meets one of the factor.
    layout = places.target.along(int(node.attr("adjoint_b")))
    own = partition.rows(factor, layout)
    if own is None:
        return None
    return partition.computed_by_towers(node, [*given, own], PARTIAL)


@by_places("SparseReorder")
def _ordered(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """Rows stay in order, and so do the towers."""
    found = addressed(partition, inputs, _MATRIX)
    if found is None:
        return None
    places, given = found
    at, values = partition.computed_by_towers(node, given, *[places.layout] * 2)
    rank, own = len(inputs[2].known), cast("Tensor", at.local)
    at = indices_of(partition, own, places.layout, places.target, rank)
    return [at, values]
