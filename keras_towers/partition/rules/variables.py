"""Reads and writes of variables.

What a variable holds is a value like any other: the towers' functions take it,
and return new ones. Of a variable in shards each tower has its own rows.
"""

from __future__ import annotations

import math

from keras_towers.partition.builder import SIZE_DTYPE
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Shape,
    Sharded,
    Value,
    Values,
    local_shape,
    replicated,
    require,
    sizes_of,
    unless_none,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, rule


@rule("ReadVariableOp")
def _read(node: Node, variable: Value) -> Values:
    return [node.partitioner.content_of(variable)]


@rule("AssignVariableOp")
def _assign(node: Node, variable: Value, content: Value) -> Values:
    node.partitioner.assign(variable, content)
    return []


@rule("AssignAddVariableOp", "AssignSubVariableOp")
def _add_to(node: Node, variable: Value, term: Value) -> Values:
    """Assign the sum of what a variable holds and a term."""
    partitioner = node.partitioner
    before = partitioner.content_of(variable)
    rows = before.sharded
    operands = [
        partitioner.replicate(value)
        if rows is None
        else partitioner.shard(value, rows)
        for value in (before, term)
    ]
    is_sum = node.type == "AssignAddVariableOp"
    after = partitioner.op(
        "AddV2" if is_sum else "Sub", operands, operands[0].shape
    )
    partitioner.assign(variable, _like(before, after))
    return []


def _like(before: Value, after: Tensor) -> Value:
    """Return a new content with the layout of the one before."""
    if before.sharded is None:
        return replicated(after, Value(REPLICATED, shape=before.shape))
    return Value(before.sharded, after, shape=before.shape)


@rule("VariableShape")
def _shape(node: Node, variable: Value) -> Values:
    partitioner = node.partitioner
    before = partitioner.content_of(variable)
    if before.sharded is not None:
        whole = partitioner.known_tensor(before.sizes, node.output_dtype())
        return [Value(REPLICATED, whole=unless_none(whole), known=before.sizes)]
    shape = partitioner.op(
        "Shape",
        [partitioner.replicate(before)],
        node.shapes[0],
        out_type=node.output_dtype(),
    )
    return [replicated(shape, Value(REPLICATED))]


# ---- lookups -----------------------------------------------------------------


@rule("ResourceGather")
def _look_up(node: Node, variable: Value, indices: Value) -> Values:
    """Look rows up where their indices are."""
    partitioner = node.partitioner
    require(not node.attr("batch_dims"))
    content = partitioner.content_of(variable)
    if _stays_in_shards(node, content, indices):
        return [_look_up_in_shards(node, content, indices)]
    table = partitioner.replicate(content)
    rows = indices.sharded
    own = indices.local if rows else partitioner.replicate(indices)
    traced = node.shapes[0]
    looked_up = partitioner.op(
        "GatherV2",
        [table, own, 0],
        local_shape(traced, indices.layout),
        batch_dims=0,
    )
    if rows is None:
        return [replicated(looked_up, Value(REPLICATED))]
    return [Value(rows, looked_up, shape=_looked_up_shape(node, indices))]


@rule("GatherV2")
def _look_up_in_value(
    node: Node, table: Value, indices: Value, axis: Value
) -> Values:
    require(axis.number == 0 and not node.attr("batch_dims"))
    require(_stays_in_shards(node, table, indices))
    return [_look_up_in_shards(node, table, indices)]


def _looked_up_shape(node: Node, indices: Value) -> Shape | None:
    """Return the shape of what is looked up."""
    traced = node.shapes[0]
    if traced.rank is None:
        return None
    return (*indices.sizes, *sizes_of(traced[indices.rank :]))


def _stays_in_shards(node: Node, table: Value, indices: Value) -> bool:
    """Whether the rows that are found are exchanged, not the table.

    They are if there are fewer of them.
    """
    rows, partitioner = table.sharded, node.partitioner
    if (
        rows is None
        or not rows.of_variables
        or rows.rows_per_unit > 1
        or not partitioner.can_exchange
        or node.shapes[0].rank is None
    ):
        return False
    examples = partitioner.options.examples
    sizes = [s if isinstance(s, int) else examples for s in indices.sizes]
    first = table.sizes[0]
    return isinstance(first, int) and first > math.prod(sizes)


def _look_up_in_shards(node: Node, table: Value, indices: Value) -> Value:
    """Look all indices up in each tower's part of a table.

    What a tower does not have is 0 in its partial sum.
    """
    partitioner = node.partitioner
    (rows, local), whole = table.as_rows(), partitioner.assemble(indices)
    shape = _looked_up_shape(node, indices)
    if rows.axis:
        looked_up = partitioner.op("GatherV2", [local, whole, 0], batch_dims=0)
        axis = rows.axis + indices.rank - 1
        part = _widened(partitioner, looked_up, rows.at_axis(axis), shape)
    else:
        whole = _holding(partitioner, whole, rows.size)
        if partitioner.options.xla:
            # Of an index outside of the table XLA looks the nearest row up.
            whole = _clipped(partitioner, whole, rows.size)
        zero = partitioner.constant(0, whole.dtype)
        own, is_own = _own_indices(partitioner, whole, rows, zero)
        looked_up = partitioner.op(
            "GatherV2",
            [local, own, 0],
            suffix=_part_of(rows),
            batch_dims=0,
        )
        part = _zero_others(partitioner, looked_up, is_own, table.rank - 1)
    sums = Value(PARTIAL, part, shape=shape)
    along = indices.sharded
    if along is None or along.blocks > 1:
        return sums
    if partitioner.options.over_columns and not along.of_variables:
        # Columns take equally many rows.
        return sums
    return Value(along, partitioner.scatter(sums, along), shape=shape)


def _own_indices(
    partitioner: Partitioner, indices: Tensor, rows: Sharded, others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the indices that a tower uses, and which are those of its rows.

    An index that is in no tower's rows stays as it is. No part of the table has
    such a row either, so that operations treat it as on one device: on a CPU
    they refuse it by its number, and on a GPU they pass over it.

    Args:
        partitioner: the partitioner.
        indices: indices of the whole table.
        rows: the layout of its rows, along axis 0.
        others: the index to use where other towers have the row.
    """
    dtype, shape = indices.dtype, indices.shape
    first, count = (
        partitioner.cast(partitioner.scaled_size(rows.rows, size), dtype)
        for size in (rows.unit.start, rows.unit.count)
    )
    of_table = _is_within(partitioner, indices, rows.size)
    shifted = partitioner.op("Sub", [indices, first], shape)
    is_own = _is_within(partitioner, shifted, count)
    kept = partitioner.op("SelectV2", [of_table, others, indices], shape)
    own = partitioner.op("SelectV2", [is_own, shifted, kept], shape)
    return own, is_own


def _is_within(
    partitioner: Partitioner, indices: Tensor, size: Tensor | int
) -> Tensor:
    """Return whether indices are at least 0 and less than a size."""
    ends = [
        partitioner.op(type_, [indices, end], indices.shape)
        for type_, end in (("GreaterEqual", 0), ("Less", size))
    ]
    return partitioner.op("LogicalAnd", ends, indices.shape)


def _clipped(partitioner: Partitioner, indices: Tensor, size: int) -> Tensor:
    """Return indices of a table, the nearest to those that are given."""
    shape = indices.shape
    least = partitioner.op("Maximum", [indices, 0], shape)
    return partitioner.op("Minimum", [least, size - 1], shape)


def _holding(partitioner: Partitioner, indices: Tensor, size: int) -> Tensor:
    """Return indices of a dtype that holds the size of a table, too."""
    if indices.dtype.max >= size:
        return indices
    return partitioner.cast(indices, SIZE_DTYPE)


def _part_of(rows: Sharded) -> str:
    """Return what the name of an operation on a part of a table ends with.

    An error shows it beside the number of rows of the part.
    """
    return f"_on_part_of_{rows.size}_rows"


def _zero_others(
    partitioner: Partitioner, values: Tensor, is_own: Tensor, more: int
) -> Tensor:
    """Return values, and 0 for the indices that other towers have.

    Args:
        partitioner: the partitioner.
        values: the values, with further axes than the indices.
        is_own: for each index, whether a tower has it.
        more: the number of further axes.
    """
    for _ in range(more):
        is_own = partitioner.op("ExpandDims", [is_own, -1])
    zeros = partitioner.op("ZerosLike", [values], values.shape)
    return partitioner.op("SelectV2", [is_own, values, zeros], values.shape)


def _widened(
    partitioner: Partitioner, values: Tensor, rows: Sharded, shape: Shape | None
) -> Tensor:
    """Return a tensor of all towers' rows that is 0 where others have them."""
    rank = len(unless_none(shape))
    unit = rows.unit
    end = partitioner.compute_size("AddV2", unit.start, unit.count)
    after = partitioner.compute_size("Sub", unit.total, end)
    ends = [
        partitioner.size_at_axis(rows.axis, rank, size)
        for size in (unit.start, after)
    ]
    widths = partitioner.op("Pack", ends, (rank, 2), is_repeated=True, axis=1)
    zero = partitioner.constant(0, values.dtype)
    return partitioner.op("PadV2", [values, widths, zero], shape)


# ---- scattered writes --------------------------------------------------------

_SCATTERS = {
    "ResourceScatterAdd": "TensorScatterAdd",
    "ResourceScatterSub": "TensorScatterSub",
    "ResourceScatterMax": "TensorScatterMax",
    "ResourceScatterMin": "TensorScatterMin",
    "ResourceScatterUpdate": "TensorScatterUpdate",
}


@rule(*_SCATTERS)
def _scatter(
    node: Node, variable: Value, indices: Value, updates: Value
) -> Values:
    """Write rows of a variable in shards where they are."""
    partitioner = node.partitioner
    rows = unless_none(partitioner.rows_of(variable))
    before = partitioner.content_of(variable)
    require(updates.rank == indices.rank + before.rank - 1)
    content = partitioner.shard(before, rows)
    where = partitioner.replicate(indices)
    has_others = not rows.axis and rows.unit.local_size != rows.unit.size
    if rows.axis:
        axis = rows.axis + indices.rank - 1
        operand = partitioner.shard(updates, rows.at_axis(axis))
    else:
        operand = partitioner.replicate(updates)
    if has_others:
        # A row beyond the last, which is dropped, takes what others have.
        where = _holding(partitioner, where, rows.size)
        count = partitioner.cast(partitioner.local_rows(rows), where.dtype)
        where, _ = _own_indices(partitioner, where, rows, count)
        content = _with_row(partitioner, content)
    after = partitioner.op(
        _SCATTERS[node.type],
        [content, partitioner.op("ExpandDims", [where, -1]), operand],
        content.shape,
        suffix=_part_of(rows) if has_others else "",
    )
    if has_others:
        after = _without_row(partitioner, after, rows)
    partitioner.assign(variable, Value(rows, after, shape=before.shape))
    return []


def _with_row(partitioner: Partitioner, rows: Tensor) -> Tensor:
    """Append a row of zeros."""
    rank = unless_none(rows.shape.rank)
    widths = [[0, 1], *[[0, 0]] * (rank - 1)]
    zero = partitioner.constant(0, rows.dtype)
    sizes = list(rows.shape)
    more = None if sizes[0] is None else sizes[0] + 1
    return partitioner.op("PadV2", [rows, widths, zero], (more, *sizes[1:]))


def _without_row(
    partitioner: Partitioner, rows: Tensor, layout: Sharded
) -> Tensor:
    """Drop the last row."""
    sizes = list(rows.shape)
    count = partitioner.local_rows(layout)
    shape = [None, *sizes[1:]]
    return partitioner.slice_rows(rows, shape, 0, 0, count)
