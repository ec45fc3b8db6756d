"""Row splits: where the rows of a ragged tensor begin and end.

A row split is the number of entries before a row. A tower counts from its own
first entry, with the splits of its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from keras_towers.partition.ir.builder import SIZE_DTYPE, Builder
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    DataDependentUnit,
    Sharded,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import require
from keras_towers.partition.ir.values import (
    RaggedSplits,
    Value,
    Values,
    known_ints,
)
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules.row_numbers import (
    key_of_lengths,
    matches,
    note_lengths,
    skip_reshapes,
)
from keras_towers.partition.layout.units import Units


def splits_value(
    units: Units, own: Tensor, rows: Sharded, key: object = None
) -> Value:
    """Return the value of row splits, given each tower's own splits.

    Args:
        units: the units of rows.
        own: the local splits.
        rows: the layout of the rows.
        key: identifies the unit of the entries; None: it is a new one.
    """
    builder = units.builder
    last = builder.cast(builder.op("Max", [own, [0]], ()), SIZE_DTYPE)
    unit = units.data_dependent_unit(key or ("parts", own), last)
    start = builder.cast(unit.start, own.dtype)
    limits = builder.op("AddV2", [limits_of(builder, own), start], (None,))
    limits = builder.exchange("gather", limits, 0, [rows.size])
    whole = builder.op("ConcatV2", [[0], limits, 0], (None,))
    splits = RaggedSplits(own, Sharded(0, unit), rows)
    shape = (rows.size + 1,)
    return Value(REPLICATED, whole=whole, shape=shape, meaning=splits)


def limits_of(builder: Builder, splits: Tensor) -> Tensor:
    """Return the end of each row."""
    return builder.op("Slice", [splits, [1], [-1]], (None,))


def splits_of(value: Value, kind: str = "row_splits") -> RaggedSplits:
    """Return the splits of a value if they are of the given kind."""
    require(
        isinstance(value.meaning, RaggedSplits) and value.meaning.kind == kind
    )
    return cast("RaggedSplits", value.meaning)


def copy_on_towers(node: Node, operands: Sequence[Tensor]) -> list[Tensor]:
    """Add an operation on vectors whose lengths differ between towers."""
    return node.copy(operands, [tf.TensorShape([None])] * node.num_outputs)


# ---- parts of splits, and splits from lengths --------------------------------


def note_part_of_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note the row starts or row limits among the row splits."""
    splits = splits_of(inputs[0])
    begin, end, stride = [known_ints(value) for value in inputs[1:]]
    masks = node.attr("begin_mask"), node.attr("end_mask")
    is_end = masks == (0, 1) and begin == [1]
    require(is_end or (masks == (1, 0) and end == [-1]))
    require(stride == [1])
    local_ends = [node.converter.replicate(value) for value in inputs[1:]]
    (local,) = copy_on_towers(node, [splits.local, *local_ends])
    outputs[0].meaning = dataclasses.replace(
        splits, local=local, kind="row_limits" if is_end else "row_starts"
    )
    outputs[0].shape = (splits.rows.size,)


def note_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note splits of another dtype."""
    splits = inputs[0].meaning
    if isinstance(splits, RaggedSplits) and node.output_dtype().is_integer:
        (local,) = copy_on_towers(node, [splits.local])
        outputs[0].meaning = dataclasses.replace(splits, local=local)


def row_lengths(node: Node, ends: Value, begins: Value) -> Values:
    """Compute the lengths of each tower's rows."""
    last, first = splits_of(ends, "row_limits"), splits_of(begins, "row_starts")
    require(last.entries == first.entries)
    lengths = node.run_on_towers([last.local, first.local], last.rows)
    note_lengths(node.units, lengths[0].own, last.entries)
    return lengths


def note_lengths_of_mask(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that a mask keeps as many entries as its counts add up to."""
    rows, lengths = outputs[0].as_rows()
    require(node.shapes[0].rank == 1 and rows.blocks == 1)
    require(node.type == "Sum" or inputs[1].row_numbers)
    layout, own = _mask_counted_by(node).as_rows()
    require(not layout.axis and layout.blocks == 1)
    unit = _unit_of_lengths(node.units, lengths)
    node.units.alias_unit(skip_reshapes(own), unit)


def _mask_counted_by(node: Node) -> Value:
    """Return the mask whose true entries an operation counts, or None."""
    cast_to_numbers = node.operation.inputs[0].op
    require(cast_to_numbers.type == "Cast")
    (mask,) = cast_to_numbers.inputs
    dtype = node.dtype(0)
    require(mask.dtype.is_bool and dtype.is_integer and dtype.size >= 4)
    if mask.op.type == "NotEqual" and mask.op.inputs[0].dtype.is_bool:
        mask, other = mask.op.inputs
        require(tf.get_static_value(other) is not None)
        require(not tf.get_static_value(other).any())
    return node.scope.values[mask.name]


# A mask of a sequence, as long as the largest length that there may be.
_NUMBERS = ("Range", 0, "most", 1)
_LENGTHS = ("Maximum", ("Minimum", None, "most"), 0)


def note_sequence_mask(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that a mask keeps as many entries of each row as lengths say."""
    parts: dict[str, tf.Tensor] = {}
    numbers, ends = node.operation.inputs
    while ends.op.type in ("Cast", "ExpandDims"):
        ends = ends.op.inputs[0]
    require(matches(numbers.op, _NUMBERS, parts))
    require(matches(ends.op, _LENGTHS, parts))
    value = node.scope.values[ends.name]
    (layout, lengths), (of_mask, mask) = value.as_rows(), outputs[0].as_rows()
    require(layout == of_mask == Sharded(0, layout.unit))
    require(value.rank == 1 and node.shapes[0].rank == 2)
    unit = _unit_of_lengths(node.units, lengths)
    node.units.alias_unit(skip_reshapes(mask), unit)


def _unit_of_lengths(units: Units, lengths: Tensor) -> DataDependentUnit:
    """Return the unit of the entries of rows with these lengths."""
    # Nothing is repeated less than 0 times.
    counts = units.builder.op("Maximum", [lengths, 0], lengths.shape)
    total = units.builder.op("Sum", [counts, [0]], ())
    return units.data_dependent_unit(
        key_of_lengths(lengths), units.builder.cast(total, SIZE_DTYPE)
    )


def note_row_limits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that a cumulative sum of lengths gives the ends of rows."""
    builder, (rows, lengths) = node.builder, inputs[0].as_rows()
    require(inputs[0].rank == 1 and rows.blocks == 1)
    require(node.dtype(0).is_integer)
    require(not node.attr("reverse") and not node.attr("exclusive"))
    local = builder.op("Cumsum", [lengths, 0], lengths.shape)
    entries = Sharded(0, _unit_of_lengths(node.units, lengths))
    outputs[0].meaning = RaggedSplits(local, entries, rows, "row_limits")


def note_row_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that row limits, after a zero, are row splits."""
    first, ends, *_ = inputs
    limits = splits_of(ends, "row_limits")
    require(len(inputs) == 3 and known_ints(first) == [0])
    operands: list[Any] = [node.converter.replicate(first), limits.local, 0]
    local = node.builder.op("ConcatV2", operands, (None,))
    outputs[0].meaning = dataclasses.replace(
        limits, local=local, kind="row_splits"
    )
    outputs[0].shape = (limits.rows.size + 1,)


def note_even_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that a range over rows and one more is splits of one entry each."""
    first, last, step = (value.number for value in inputs)
    # If it is a coincidence, these are the splits of such rows all the same.
    rows = node.units.find_rows(0, last - 1, may_coincide=True)
    if first != 0 or step != 1 or rows is None or outputs[0].meaning:
        return
    dtype = node.output_dtype()
    count = node.builder.cast(node.units.local_rows(rows), dtype)
    end = node.builder.op("AddV2", [count, 1], ())
    local = node.builder.op("Range", [0, end, 1], (None,))
    outputs[0].meaning = RaggedSplits(local, rows, rows)
    outputs[0].shape = (last,)


def note_scaled_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that scaled splits delimit rows with so many times more entries."""
    splits = splits_of(inputs[0])
    (by,) = known_ints(inputs[1])
    entries = splits.entries
    require(entries == splits.rows and by >= 1)
    local = node.builder.op("Mul", [splits.local, by], (None,))
    outputs[0].meaning = dataclasses.replace(
        splits,
        local=local,
        entries=dataclasses.replace(entries, rows=entries.rows * by),
    )


def note_places(node: Node, inputs: Values, outputs: Values) -> None:
    """Note places in rows, such as where the first entries of each row end."""
    place, second = place_of(inputs[0]), inputs[1]
    is_after, is_before = place.is_after, place.is_before
    if node.type in ("AddV2", "Sub"):
        (by,) = known_ints(second)
        by = by if node.type == "AddV2" else -by
        is_after, is_before = is_after and by >= 0, is_before and by <= 0
        operand = node.converter.replicate(second)
    else:
        other = place_of(second)
        require(place.entries == other.entries and place.rows == other.rows)
        # The lesser of two places is before the end if one of them is.
        of_starts, of_ends = all, any
        if node.type == "Maximum":
            of_starts, of_ends = any, all
        is_after = of_starts((is_after, other.is_after))
        is_before = of_ends((is_before, other.is_before))
        operand = other.local
    (local,) = copy_on_towers(node, [place.local, operand])
    outputs[0].meaning = dataclasses.replace(
        place, local=local, kind="", is_after=is_after, is_before=is_before
    )
    outputs[0].shape = (place.rows.size,)


def place_of(value: Value) -> RaggedSplits:
    """Return a place in each row, such as its start."""
    place = value.meaning
    require(isinstance(place, RaggedSplits) and place.kind != "row_splits")
    return cast("RaggedSplits", place)
