"""Gathers, scatters, segments and sparse matrices.

If row numbers refer to a tower's own rows, it indexes them locally.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

from keras_towers.partition.ir.builder import static
from keras_towers.partition.ir.layouts import PARTIAL, REPLICATED
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import NotDivided, require, unless_none
from keras_towers.partition.ir.registry import Factors, NewAxis, Rule, operation
from keras_towers.partition.ir.values import (
    BelowLimit,
    RowNumbers,
    Value,
    Values,
    known_axes,
)
from keras_towers.partition.layout import folding
from keras_towers.partition.layout.conversions import Converter
from keras_towers.partition.layout.division import divide
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules.row_numbers import (
    entry_numbers,
    index_value,
    note_lengths,
    note_taken,
    repeat_rows,
    skip_reshapes,
)
from keras_towers.partition.layout.rules.row_splits import note_lengths_of_mask
from keras_towers.partition.layout.rules.shapes import (
    like_first,
    requested_shape,
)
from keras_towers.partition.layout.rules.variables import look_up_in_value

# ---- local row numbers -------------------------------------------------------

# The role of an input: row numbers, or those of all rows, or indices whose
# first column has them; one entry for each number; the numbered rows; the shape
# of a tensor with these rows; the number of rows; or a replicated input.
Role: TypeAlias = Literal[
    "numbers", "all", "indices", "entries", "rows", "shape", "count", "same"
]
_OF_NUMBERS = ("numbers", "all", "indices")
_MATRIX: tuple[Role, ...] = ("indices", "entries", "shape")


def _index_locally(*roles: Role) -> Rule:
    """Return the rule for operations whose inputs have the given roles."""

    def rule(node: Node, *inputs: Value) -> Values:
        numbers, operands = _local_operands(node.converter, inputs, roles)
        if "all" in roles:
            entries = numbers.layout
            require(numbers.are_all and entries.blocks == 1 and entries.rows)
        picks = roles == ("rows", "indices")
        layout = numbers.layout if picks else numbers.row_layout
        return node.run_on_towers(operands, layout)

    return rule


def _local_operands(
    converter: Converter, inputs: Values, roles: Sequence[Role]
) -> tuple[RowNumbers, list[Tensor]]:
    """Return the input that is row numbers, and all local operands.

    Args:
        converter: converts values.
        inputs: the N first inputs of an operation.
        roles: their roles.

    Raises:
        NotDivided: the row numbers may refer to another tower's rows.
    """
    pairs = list(zip(inputs, roles, strict=True))
    (numbers,) = (
        _row_numbers_of(value, role)
        for value, role in pairs
        if role in _OF_NUMBERS
    )
    return numbers, [
        _local_operand(converter, value, role, numbers) for value, role in pairs
    ]


def _row_numbers_of(value: Value, role: Role) -> RowNumbers:
    """Return the row numbers of an input with this role."""
    numbers, shape = unless_none(value.row_numbers), value.sizes
    require(shape)
    if role != "indices":
        require(not numbers.is_first_column)
    else:
        require(numbers.is_first_column or shape[-1] == 1)
        require(numbers.layout.axis < len(shape) - 1)
    return numbers


def _local_operand(
    converter: Converter, value: Value, role: Role, numbers: RowNumbers
) -> Tensor:
    """Return the local operand of an input."""
    builder, units = converter.builder, converter.units
    target = numbers.row_layout
    if role in _OF_NUMBERS:
        return numbers.local
    if role == "same" or (role == "entries" and value.shape == ()):
        return converter.replicate(value)
    if role == "entries":
        return converter.shard(value, numbers.layout)
    if role == "rows":
        layout, rows = value.as_rows()
        require(layout == target)
        return rows
    # The first size, or the only one.
    known = value.known_array
    require(known.flat[0] == target.size)
    if role == "count":
        count = units.local_rows(target)
        return builder.cast(count, converter.replicate(value).dtype)
    return converter.local_target(value, list(known), target)


def _sparse_matmul(node: Node, *inputs: Value) -> Values:
    """Multiply a sparse matrix whose rows are divided."""
    converter = node.converter
    *matrix, factor = inputs
    numbers, operands = _local_operands(converter, matrix, _MATRIX)
    if not node.attr("adjoint_a"):
        operands.append(converter.replicate(factor))
        return node.run_on_towers(operands, numbers.row_layout)
    # Each row of the matrix is multiplied with a row of the factor.
    layout = numbers.row_layout.at_axis(int(node.attr("adjoint_b")))
    rows = converter.shard(factor, layout)
    return node.run_on_towers([*operands, rows], PARTIAL)


def _sparse_reorder(node: Node, *inputs: Value) -> Values:
    """Sort the entries of a sparse matrix by rows, tower by tower."""
    numbers, operands = _local_operands(node.converter, inputs, _MATRIX)
    indices, entries = node.run_on_towers(operands, *[numbers.layout] * 2)
    rank = len(inputs[2].known_array)
    indices = index_value(
        node.builder, indices.own, numbers.layout, numbers.row_layout, rank
    )
    return [indices, entries]


def _fill_empty_rows(node: Node, *inputs: Value) -> Values:
    """Add an entry to each row of a sparse matrix that has none."""
    builder = node.builder
    numbers, operands = _local_operands(
        node.converter, inputs, (*_MATRIX, "same")
    )
    vector, rows = static((None,)), numbers.row_layout
    indices, entries, is_empty, places = node.copy(
        operands, [static((None, 2)), *[vector] * 3]
    )
    filled = node.units.found_rows(("filled", entries), entries)
    found = index_value(builder, indices, filled, rows, rank=2)
    found.meaning = dataclasses.replace(
        unless_none(found.row_numbers), are_all=True
    )
    return [
        found,
        Value(filled, entries, shape=(filled.size,)),
        Value(rows, is_empty, shape=(rows.size,)),
        entry_numbers(builder, places, numbers.layout, filled),
    ]


def _gradients_of_filled(node: Node, places: Value, grads: Value) -> Values:
    numbers = _row_numbers_of(places, "numbers")
    rows = node.converter.shard(grads, numbers.row_layout)
    return node.run_on_towers([numbers.local, rows], numbers.layout, PARTIAL)


def _dynamic_stitch(node: Node, *inputs: Value) -> Values:
    """Join all parts of a dynamic partition, tower by tower."""
    half = len(inputs) // 2
    parts = [v.row_numbers for v in inputs[:half] if v.row_numbers is not None]
    require(len(parts) == half and _are_all_parts(parts))
    pairs = zip(inputs[half:], parts, strict=True)
    rows = [node.converter.shard(value, part.layout) for value, part in pairs]
    numbers = [part.local for part in parts]
    return node.run_on_towers([*numbers, *rows], parts[0].row_layout)


def _are_all_parts(parts: Sequence[RowNumbers]) -> bool:
    """Whether inputs are all parts of one partition of all row numbers."""
    parting = parts[0].local.operation
    if parting is None or parting.type != "DynamicPartition":
        return False
    parted = skip_reshapes(parting.inputs[0]).operation
    is_range = parted is not None and parted.type == "Range"
    is_complete = [part.local for part in parts] == parting.outputs
    return is_range and is_complete and parts[0].grain == 1


# ---- gathers -----------------------------------------------------------------


def _axis_and_batch(
    node: Node, values: Value, indices: Value, along: Value
) -> tuple[int, int]:
    """Return the axis of a gather, and its number of batch axes."""
    axis, *_ = known_axes(along, values.rank)
    batch = node.attr("batch_dims")
    return axis, batch % len(indices.sizes) if batch < 0 else batch


def _gather_axes(
    node: Node, values: Value, indices: Value, along: Value
) -> Factors:
    axis, batch = _axis_and_batch(node, values, indices, along)
    kept = [f"v{a}" for a in range(values.rank)]
    picked = [f"p{a}" for a in range(indices.rank)]
    # The indices share the axes of the batch.
    picked[:batch] = kept[:batch]
    output = [*kept[:axis], *picked[batch:], *kept[axis + 1 :]]
    labels = [*kept[:axis], None, *kept[axis + 1 :]]
    return Factors([labels, picked], [output], linear=[[0]])


def _gather(node: Node, values: Value, indices: Value, along: Value) -> Values:
    """Gather rows by their numbers."""
    with contextlib.suppress(NotDivided):
        return [repeat_rows(node)]
    numbered = _row_numbers_of(indices, "numbers")
    axis, batch = _axis_and_batch(node, values, indices, along)
    of_rows, rows = values.as_rows()
    require(not batch and of_rows == numbered.row_layout.at_axis(axis))
    operands = [rows, numbered.local, node.converter.replicate(along)]
    layout = numbered.layout.at_axis(axis + numbered.layout.axis)
    return node.run_on_towers(operands, layout)


def _note_limit(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that indices are less than the size of an axis."""
    values, indices, along = inputs
    axis, batch = _axis_and_batch(node, values, indices, along)
    size = values.sizes[axis]
    if axis == batch > 0 and isinstance(size, int) and not indices.meaning:
        indices.meaning = BelowLimit(size)


def _labels_of_indices(indices: Value) -> tuple[list[str], int]:
    """Return labels of all axes of indices but the last, and its size."""
    depth = indices.shape[-1] if indices.shape else None
    if not isinstance(depth, int):
        raise NotDivided
    return [f"p{a}" for a in range(indices.rank - 1)], depth


def _gather_nd_axes(node: Node, values: Value, indices: Value) -> Factors:
    picked, depth = _labels_of_indices(indices)
    trailing = [f"v{a}" for a in range(depth, values.rank)]
    return Factors(
        [[*[None] * depth, *trailing], [*picked, None]],
        [[*picked, *trailing]],
        linear=[[0]],
        needs_rows=True,
    )


# ---- scatters ----------------------------------------------------------------


def _scatter_nd_axes(
    node: Node, indices: Value, rows: Value, target: Value
) -> Factors:
    picked, depth = _labels_of_indices(indices)
    trailing = [f"v{a}" for a in range(rows.rank - len(picked))]
    dtype = node.dtype(1)
    # Only numbers can be added up.
    is_number = dtype.is_floating or dtype.is_complex or dtype.is_integer
    # The trailing axes have the global shape that is given.
    labels = [*picked, *[None] * len(trailing)]
    return Factors(
        [[*picked, None], labels],
        [[*[None] * depth, *trailing]],
        linear=[[1]],
        summed=picked if is_number else (),
    )


def _scatter_add(node: Node, values: Value, *inputs: Value) -> Values:
    """Add the rows of each tower to its partial sum."""
    indices, rows = inputs
    require(rows.shape is not None and values.sharded is None)
    scattered = _scatter_nd_axes(node, indices, rows, values)
    added = Value(
        REPLICATED, node.converter.to_partial(values), shape=values.shape
    )
    factors = Factors(
        [None, *scattered.inputs],
        scattered.outputs,
        linear=(),
        summed=scattered.summed,
    )
    return divide(node, [added, indices, rows], factors)


# ---- segments ----------------------------------------------------------------


def _segment_axes(
    node: Node, values: Value, segments: Value, count: Value
) -> Factors:
    labels = range(values.rank)
    of_segments, trailing = labels[: segments.rank], labels[segments.rank :]
    is_sum = node.type == "UnsortedSegmentSum"
    return Factors(
        [labels, of_segments],
        [[NewAxis(count.number), *trailing]],
        linear=[[0]] if is_sum else (),
        summed=of_segments if is_sum else (),
    )


def _segment_extreme(
    node: Node, values: Value, segments: Value, count: Value
) -> Values:
    converter = node.converter
    layout, _ = (segments if segments.sharded else values).as_rows()
    require(layout.axis < segments.rank)
    rows = [converter.shard(value, layout) for value in (values, segments)]
    (own,) = node.copy([*rows, converter.replicate(count)])
    kind = node.type.removeprefix("UnsortedSegment")
    return [converter.reduce_over_towers(kind, own)]


def _count_of_rows(
    node: Node, values: Value, size: Value, weights: Value
) -> Values:
    """Count how often each of a tower's rows is referred to."""
    role: Role = "same" if weights.shape == (0,) else "entries"
    numbers, operands = _local_operands(
        node.converter, (values, size, weights), ("numbers", "count", role)
    )
    require(values.rank == 1)
    (counts,) = node.run_on_towers(operands, numbers.row_layout)
    if role == "same" and not node.attr("binary_output"):
        note_lengths(node.units, counts.own, numbers.layout)
    return [counts]


def _bincount_axes(
    node: Node, values: Value, size: Value, weights: Value
) -> Factors:
    labels: list[Hashable] = list(range(values.rank))
    # The rows of a matrix are counted independently.
    is_dense = node.type == "DenseBincount"
    is_matrix = is_dense and values.rank == 2
    if is_matrix:
        labels[1] = None
    elif is_dense:
        # Binary outputs cannot be added up.
        require(not node.attr("binary_output"))
    is_weighted = weights.shape != (0,)
    operands = [labels, None, labels if is_weighted else [None]]
    if is_matrix:
        return Factors(operands, [labels])
    return Factors(
        operands, [[None]], linear=[[2]] if is_weighted else (), summed=labels
    )


# ---- what is known of them ---------------------------------------------------

_on_updates = _index_locally("rows", "indices", "entries")
_on_segments = _index_locally("entries", "numbers", "count")
# fmt: off
operation("GatherV2", _gather, look_up_in_value, labels=_gather_axes,
    notes=[note_taken, _note_limit], fold=folding.gathered, work="picked")
operation("GatherNd", _index_locally("rows", "indices"),
    labels=_gather_nd_axes, work="picked")
operation("ScatterNd", _index_locally("indices", "entries", "shape"),
    labels=_scatter_nd_axes, shape=requested_shape(2), fold=folding.scattered)
operation("TensorScatterUpdate TensorScatterMax TensorScatterMin", _on_updates,
    shape=like_first)
operation("TensorScatterAdd TensorScatterSub", _on_updates, _scatter_add,
    shape=like_first)
operation("SparseToDense",
    _index_locally("indices", "shape", "entries", "same"))
operation("UnsortedSegmentSum", _on_segments, labels=_segment_axes,
    notes=[note_lengths_of_mask])
operation("UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
    _on_segments, _segment_extreme, labels=_segment_axes)
operation("UnsortedSegmentJoin", _on_segments)
# Their outputs end with the last segment that has an entry.
operation("SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd",
    _index_locally("entries", "all"))
operation("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN",
    _index_locally("same", "entries", "all"))
operation("SparseTensorDenseMatMul", _sparse_matmul)
operation("SparseReorder", _sparse_reorder)
operation("SparseFillEmptyRows", _fill_empty_rows)
operation("SparseFillEmptyRowsGrad", _gradients_of_filled)
operation("DynamicStitch", _dynamic_stitch, fold=folding.stitched)
operation("ParallelDynamicStitch", _dynamic_stitch)
operation("DenseBincount", _count_of_rows, labels=_bincount_axes)
operation("Bincount", labels=_bincount_axes)
