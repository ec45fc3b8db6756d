"""Reads, writes and lookups of variables, such as embedding tables.

The value of a variable is like any other value: the towers' functions take it,
and return the new one. Each tower has its own rows of a variable in shards.
"""

from __future__ import annotations

import math
import re

import numpy as np

from keras_towers.partition.ir.builder import SIZE_DTYPE, Builder
from keras_towers.partition.ir.layouts import (
    PARTIAL,
    REPLICATED,
    Shape,
    Sharded,
    local_shape,
    sizes_of,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import asserted, require, unless_none
from keras_towers.partition.ir.registry import operation
from keras_towers.partition.ir.sizes import Dimension
from keras_towers.partition.ir.values import Value, Values, replicated
from keras_towers.partition.layout.nodes import Node


def _read(node: Node, variable: Value) -> Values:
    return [node.variables.content_of(variable)]


def _assign(node: Node, variable: Value, content: Value) -> Values:
    node.variables.assign(variable, content)
    return []


def _add_to(node: Node, variable: Value, term: Value) -> Values:
    """Add a term to a variable."""
    converter, variables = node.converter, node.variables
    # XLA returns new values of variables.
    if not node.options.xla and variables.add_in_place(
        node.type, variable, term
    ):
        return []
    before = variables.content_of(variable)
    rows = before.sharded
    operands = [
        converter.replicate(value)
        if rows is None
        else converter.shard(value, rows)
        for value in (before, term)
    ]
    is_sum = node.type == "AssignAddVariableOp"
    after = node.builder.op(
        "AddV2" if is_sum else "Sub", operands, operands[0].shape
    )
    content = Value(rows or REPLICATED, after, shape=before.shape)
    if rows is None:
        content = replicated(after, content)
    variables.assign(variable, content)
    return []


def _shape_of_variable(node: Node, variable: Value) -> Values:
    content = node.variables.content_of(variable)
    if content.sharded is None:
        shape = node.builder.op(
            "Shape",
            [node.converter.replicate(content)],
            node.shapes[0],
            out_type=node.output_dtype(),
        )
        return [replicated(shape, Value(REPLICATED))]
    known = np.array(content.sizes, object)
    whole = node.units.known_tensor(known, node.output_dtype())
    return [Value(REPLICATED, whole=asserted(whole), known=known)]


# ---- lookups -----------------------------------------------------------------


def _look_up_keys(
    node: Node, table: Value, keys: Value, default: Value
) -> Values:
    """Look up keys where they are, in a table that all towers share.

    If several processes have a table that may change, the first one looks up.
    """
    is_shared = (
        "ranks" not in node.options.axes or asserted(table.whole).is_fixed
    )
    require(node.builder.can_exchange and is_shared)
    # If keys or values are vectors, the axes differ.
    require(not default.rank and node.shapes[0].rank == keys.rank)
    layout, own = keys.as_rows()
    converter = node.converter
    operands = [converter.replicate(table), own, converter.replicate(default)]
    (values,) = node.copy(operands, [own.shape])
    node.variables.record_use(node.builder.last, reads=True)
    return [Value(layout, values, shape=keys.shape)]


def _lookup_shape(node: Node, table: Value, keys: Value, other: Value) -> Shape:
    # If keys or values are vectors, the axes differ.
    require(not other.rank and node.shapes[0].rank == keys.rank)
    return keys.sizes


def _look_up(node: Node, variable: Value, indices: Value) -> Values:
    """Look up rows on the towers that have the indices."""
    converter = node.converter
    require(not node.attr("batch_dims"))
    content = node.variables.content_of(variable)
    if _stays_in_shards(node, content, indices):
        return [_look_up_in_shards(node, content, indices)]
    table = converter.replicate(content)
    rows = indices.sharded
    own = indices.own if rows else converter.replicate(indices)
    traced = node.shapes[0]
    looked_up = node.builder.op(
        "GatherV2",
        [table, own, 0],
        local_shape(traced, indices.layout),
        batch_dims=0,
    )
    if rows is None:
        return [replicated(looked_up, Value(REPLICATED))]
    return [Value(rows, looked_up, shape=_looked_up_shape(node, indices))]


def look_up_in_value(
    node: Node, table: Value, indices: Value, axis: Value
) -> Values:
    """Look up rows in a table in shards."""
    require(axis.number == 0 and not node.attr("batch_dims"))
    require(_stays_in_shards(node, table, indices))
    return [_look_up_in_shards(node, table, indices)]


def _looked_up_shape(node: Node, indices: Value) -> Shape | None:
    """Return the shape of the rows that are looked up."""
    traced = node.shapes[0]
    if traced.rank is None:
        return None
    return (*indices.sizes, *sizes_of(traced[indices.rank :]))


def _stays_in_shards(node: Node, table: Value, indices: Value) -> bool:
    """Whether a lookup exchanges the rows it finds, not the whole table.

    It does if there are fewer of them.
    """
    rows = table.sharded
    if (
        rows is None
        or not rows.of_variables
        or rows.rows_per_unit > 1
        or not node.builder.can_exchange
        or node.shapes[0].rank is None
    ):
        return False
    examples = node.options.examples
    sizes = [s if isinstance(s, int) else examples for s in indices.sizes]
    first = table.sizes[0]
    return isinstance(first, int) and first > math.prod(sizes)


def _look_up_in_shards(node: Node, table: Value, indices: Value) -> Value:
    """Look up all indices in each tower's part of a table.

    Rows of other towers are 0 in a tower's partial sum.
    """
    builder, converter = node.builder, node.converter
    (rows, local), whole = table.as_rows(), converter.assemble(indices)
    shape = _looked_up_shape(node, indices)
    if rows.axis:
        own_rows = rows.at_axis(rows.axis + indices.rank - 1)
        looked_up = builder.op(
            "GatherV2",
            [local, whole, 0],
            local_shape(node.shapes[0], own_rows),
            batch_dims=0,
        )
        part = _widened(builder, looked_up, own_rows, shape)
    else:
        whole = _holding(builder, whole, rows.size)
        if node.options.xla:
            # For an index outside of the table, XLA takes the nearest row.
            whole = builder.op("Maximum", [whole, 0], whole.shape)
            whole = builder.op("Minimum", [whole, rows.size - 1], whole.shape)
        zero = builder.constant(0, whole.dtype)
        own, is_own = _own_indices(builder, whole, rows, zero)
        looked_up = builder.op(
            "GatherV2",
            [local, own, 0],
            node.shapes[0],
            suffix=_part_of(rows),
            batch_dims=0,
        )
        part = _zero_others(builder, looked_up, is_own, table.rank - 1)
    sums = Value(PARTIAL, part, shape=shape)
    along = indices.sharded
    if along is None or along.blocks > 1:
        return sums
    if node.options.over_columns and not along.of_variables:
        # Columns take equally many rows.
        return sums
    return Value(along, converter.scatter(sums, along), shape=shape)


def _own_indices(
    builder: Builder, indices: Tensor, rows: Sharded, others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a tower's indices, and a mask of those that are in its rows.

    An index outside of the table stays as it is, so that operations treat it as
    on one device: a CPU refuses it, and a GPU passes over it.

    Args:
        builder: adds operations.
        indices: indices of the whole table.
        rows: the layout of its rows, along axis 0.
        others: the index to use where other towers have the row.
    """
    dtype, shape = indices.dtype, indices.shape
    first, count = (
        builder.cast(builder.scaled_size(rows.rows, size), dtype)
        for size in (rows.unit.start, rows.unit.count)
    )
    of_table = _is_within(builder, indices, rows.size)
    shifted = builder.op("Sub", [indices, first], shape)
    is_own = _is_within(builder, shifted, count)
    kept = builder.op("SelectV2", [of_table, others, indices], shape)
    own = builder.op("SelectV2", [is_own, shifted, kept], shape)
    return own, is_own


def _is_within(
    builder: Builder, indices: Tensor, size: Tensor | Dimension
) -> Tensor:
    """Return whether indices are at least 0 and less than a size."""
    ends = [
        builder.op(type_, [indices, end], indices.shape)
        for type_, end in (("GreaterEqual", 0), ("Less", size))
    ]
    return builder.op("LogicalAnd", ends, indices.shape)


def _holding(builder: Builder, indices: Tensor, size: Dimension) -> Tensor:
    """Return indices in a dtype that can represent the size of a table."""
    if indices.dtype.max >= size:
        return indices
    return builder.cast(indices, SIZE_DTYPE)


_PART_OF = "_on_part_of_{}_rows"


def _part_of(rows: Sharded) -> str:
    """Return the end of an operation's name that marks a part of a table."""
    return _PART_OF.format(rows.size)


def of_whole_table(message: str) -> str:
    """Return an error message about a table, given that about a part of it.

    TensorFlow names the rows of the part, and the operation.
    """
    part = re.search(_PART_OF.format(r"(\d+)"), message)
    if part is None:
        return message
    bounds = r"(is not in \[0, |does not index into shape \[)\d+"
    message = re.sub(bounds, rf"\g<1>{part[1]}", message)
    return message.replace(part[0], "")


def _zero_others(
    builder: Builder, values: Tensor, is_own: Tensor, more: int
) -> Tensor:
    """Return values, with 0 at the indices that other towers have.

    Args:
        builder: adds operations.
        values: the values, with further axes than the indices.
        is_own: for each index, whether a tower has it.
        more: the number of further axes.
    """
    for _ in range(more):
        is_own = builder.op("ExpandDims", [is_own, -1])
    return builder.only_if(is_own, values)


def _widened(
    builder: Builder, values: Tensor, rows: Sharded, shape: Shape | None
) -> Tensor:
    """Return a tensor of all towers' rows, with 0 in those of other towers."""
    unit = rows.unit
    end = builder.compute_size("AddV2", unit.start, unit.count)
    after = builder.compute_size("Sub", unit.total, end)
    sizes = asserted(shape)
    return builder.pad_axis(values, rows.axis, unit.start, after, sizes)


# ---- scattered writes --------------------------------------------------------


def _scatter(
    node: Node, variable: Value, indices: Value, updates: Value
) -> Values:
    """Write rows of a variable in shards on the towers that have them."""
    builder, units, converter, variables = (
        node.builder,
        node.units,
        node.converter,
        node.variables,
    )
    rows = unless_none(variables.rows_of(variable))
    before = variables.content_of(variable)
    require(updates.rank == indices.rank + before.rank - 1)
    content = converter.shard(before, rows)
    where = converter.replicate(indices)
    has_others = not rows.axis and rows.unit.local_size != rows.unit.size
    if rows.axis:
        axis = rows.axis + indices.rank - 1
        operand = converter.shard(updates, rows.at_axis(axis))
    else:
        operand = converter.replicate(updates)
    if has_others:
        # A row beyond the last, which is dropped, takes what others have.
        where = _holding(builder, where, rows.size)
        count = builder.cast(units.local_rows(rows), where.dtype)
        where, _ = _own_indices(builder, where, rows, count)
        more, *sizes = content.shape
        more = None if more is None else more + 1
        content = builder.pad_axis(content, 0, 0, 1, [more, *sizes])
    after = builder.op(
        node.type.replace("Resource", "Tensor"),
        [content, builder.op("ExpandDims", [where, -1]), operand],
        content.shape,
        suffix=_part_of(rows) if has_others else "",
    )
    if has_others:
        after = units.drop_padding(after, [*before.sizes], rows)
    variables.assign(variable, Value(rows, after, shape=before.shape))
    return []


# ---- what is known of them ---------------------------------------------------

# fmt: off
operation("ReadVariableOp", _read, memory="input", effect="reads")
operation("AssignVariableOp", _assign)
operation("AssignAddVariableOp AssignSubVariableOp", _add_to)
operation("VariableShape", _shape_of_variable, effect="reads")
operation("ResourceGather", _look_up, effect="reads", work="picked")
operation("ResourceGatherNd VarIsInitializedOp", effect="reads", work="picked")
operation("""
    ResourceScatterAdd ResourceScatterSub ResourceScatterMax ResourceScatterMin
    ResourceScatterUpdate
""", _scatter)
operation("LookupTableFindV2", _look_up_keys, shape=_lookup_shape)
operation("LookupTableInsertV2 LookupTableRemoveV2 LookupTableImportV2",
    effect="writes")
