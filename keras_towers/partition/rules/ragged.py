"""Ragged rows, whose entries are those between two row splits.

A row split is the number of entries before a row. A tower counts from its own
first entry, and uses the splits of its own rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import SIZE_DTYPE, Builder
from keras_towers.partition.layouts import (
    REPLICATED,
    DataDependentUnit,
    RaggedSplits,
    RowNumbers,
    Shape,
    Sharded,
    Value,
    Values,
    known_ints,
)
from keras_towers.partition.nodes import Node
from keras_towers.partition.program import Tensor
from keras_towers.partition.reasons import (
    SHAPE,
    NotDivided,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.registry import notes, rule, shape_of
from keras_towers.partition.rules.row_numbers import (
    key_of_lengths,
    matches,
    note_lengths,
    skip_reshapes,
)
from keras_towers.partition.sizes import UNKNOWN, Dimension
from keras_towers.partition.units import Units


def splits_value(
    units: Units, own: Tensor, key: object, rows: Sharded
) -> Value:
    """Return the value of row splits of which each tower has its own.

    Args:
        units: the units of rows.
        own: the local splits.
        key: identifies the unit of the entries.
        rows: the layout of the rows.
    """
    builder = units.builder
    last = builder.cast(builder.op("Max", [own, [0]], ()), SIZE_DTYPE)
    unit = units.data_dependent_unit(key, last)
    start = builder.cast(unit.start, own.dtype)
    limits = builder.op("AddV2", [_limits(builder, own), start], (None,))
    limits = builder.exchange("gather", limits, 0, [rows.size])
    whole = builder.op("ConcatV2", [[0], limits, 0], (None,))
    splits = RaggedSplits(own, Sharded(0, unit), rows)
    shape = (rows.size + 1,)
    return Value(REPLICATED, whole=whole, shape=shape, meaning=splits)


def _limits(builder: Builder, splits: Tensor) -> Tensor:
    """Return where rows end."""
    return builder.op("Slice", [splits, [1], [-1]], (None,))


def _splits(value: Value, kind: str = "row_splits") -> RaggedSplits:
    """Return the splits of a value, if they are of this kind."""
    require(
        isinstance(value.meaning, RaggedSplits) and value.meaning.kind == kind
    )
    return cast("RaggedSplits", value.meaning)


def _copy_on_towers(node: Node, operands: Sequence[Tensor]) -> list[Tensor]:
    """Add an operation on vectors, whose lengths on towers are their own."""
    return node.copy(operands, [tf.TensorShape([None])] * node.num_outputs)


# ---- parts of splits, and splits from lengths --------------------------------


@notes("StridedSlice")
def _note_part_of_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note the row starts or row limits among the row splits."""
    splits = _splits(inputs[0])
    begin, end, stride = [known_ints(value) for value in inputs[1:]]
    masks = node.attr("begin_mask"), node.attr("end_mask")
    is_end = masks == (0, 1) and begin == [1]
    require(is_end or (masks == (1, 0) and end == [-1]))
    require(stride == [1])
    local_ends = [node.converter.replicate(value) for value in inputs[1:]]
    (local,) = _copy_on_towers(node, [splits.local, *local_ends])
    outputs[0].meaning = dataclasses.replace(
        splits, local=local, kind="row_limits" if is_end else "row_starts"
    )
    outputs[0].shape = (splits.rows.size,)


@notes("Cast")
def _note_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note splits of another dtype."""
    splits = inputs[0].meaning
    if isinstance(splits, RaggedSplits) and node.output_dtype().is_integer:
        (local,) = _copy_on_towers(node, [splits.local])
        outputs[0].meaning = dataclasses.replace(splits, local=local)


@rule("Sub")
def _row_lengths(node: Node, ends: Value, begins: Value) -> Values:
    last, first = _splits(ends, "row_limits"), _splits(begins, "row_starts")
    require(last.entries == first.entries)
    lengths = node.run_on_towers([last.local, first.local], last.rows)
    note_lengths(node.units, lengths[0].own, last.entries)
    return lengths


@notes("Sum", "UnsortedSegmentSum")
def _note_lengths(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that what a mask has in each row adds up to what it leaves."""
    rows, lengths = outputs[0].as_rows()
    require(node.shapes[0].rank == 1 and rows.blocks == 1)
    require(node.type == "Sum" or inputs[1].row_numbers)
    layout, own = _mask_counted_by(node).as_rows()
    require(not layout.axis and layout.blocks == 1)
    unit = _unit_of_lengths(node.units, lengths)
    node.units.alias_unit(skip_reshapes(own), unit)


def _mask_counted_by(node: Node) -> Value:
    """Return the mask of which an operation adds up the entries."""
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


@notes("Less")
def _note_sequence_mask(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that a mask leaves as many entries of each row as lengths say."""
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


@notes("Cumsum")
def _note_row_limits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note that rows end where the sum of their lengths says."""
    builder, (rows, lengths) = node.builder, inputs[0].as_rows()
    require(inputs[0].rank == 1 and rows.blocks == 1)
    require(node.dtype(0).is_integer)
    require(not node.attr("reverse") and not node.attr("exclusive"))
    local = builder.op("Cumsum", [lengths, 0], lengths.shape)
    entries = Sharded(0, _unit_of_lengths(node.units, lengths))
    outputs[0].meaning = RaggedSplits(local, entries, rows, "row_limits")


@notes("ConcatV2")
def _note_row_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note row limits after the start of the first row."""
    first, ends, *_ = inputs
    limits = _splits(ends, "row_limits")
    require(len(inputs) == 3 and known_ints(first) == [0])
    operands: list[Any] = [node.converter.replicate(first), limits.local, 0]
    local = node.builder.op("ConcatV2", operands, (None,))
    outputs[0].meaning = dataclasses.replace(
        limits, local=local, kind="row_splits"
    )
    outputs[0].shape = (limits.rows.size + 1,)


@notes("Range")
def _note_even_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note a range over rows, and one more: each row has one entry."""
    first, last, step = (value.number for value in inputs)
    rows = node.units.find_rows(0, last - 1)
    if first != 0 or step != 1 or rows is None or outputs[0].meaning:
        return
    dtype = node.output_dtype()
    count = node.builder.cast(node.units.local_rows(rows), dtype)
    end = node.builder.op("AddV2", [count, 1], ())
    local = node.builder.op("Range", [0, end, 1], (None,))
    outputs[0].meaning = RaggedSplits(local, rows, rows)
    outputs[0].shape = (last,)


@notes("Mul")
def _note_scaled_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note splits of rows that each have as many times more entries."""
    splits = _splits(inputs[0])
    (by,) = known_ints(inputs[1])
    entries = splits.entries
    require(entries == splits.rows and by >= 1)
    local = node.builder.op("Mul", [splits.local, by], (None,))
    outputs[0].meaning = dataclasses.replace(
        splits,
        local=local,
        entries=dataclasses.replace(entries, rows=entries.rows * by),
    )


@notes("AddV2", "Sub", "Minimum", "Maximum")
def _note_places(node: Node, inputs: Values, outputs: Values) -> None:
    """Note places in rows, such as where the first entries of each row end."""
    place, second = _place(inputs[0]), inputs[1]
    is_after, is_before = place.is_after, place.is_before
    if node.type in ("AddV2", "Sub"):
        (by,) = known_ints(second)
        by = by if node.type == "AddV2" else -by
        is_after, is_before = is_after and by >= 0, is_before and by <= 0
        operand = node.converter.replicate(second)
    else:
        other = _place(second)
        require(place.entries == other.entries and place.rows == other.rows)
        # The lesser of two places is before the end if one of them is.
        of_starts, of_ends = all, any
        if node.type == "Maximum":
            of_starts, of_ends = any, all
        is_after = of_starts((is_after, other.is_after))
        is_before = of_ends((is_before, other.is_before))
        operand = other.local
    (local,) = _copy_on_towers(node, [place.local, operand])
    outputs[0].meaning = dataclasses.replace(
        place, local=local, kind="", is_after=is_after, is_before=is_before
    )
    outputs[0].shape = (place.rows.size,)


def _place(value: Value) -> RaggedSplits:
    """Return a place for each row, such as its start."""
    place = value.meaning
    require(isinstance(place, RaggedSplits) and place.kind != "row_splits")
    return cast("RaggedSplits", place)


@rule("Minimum")
def _least_number(node: Node, *numbers: Value) -> Values:
    """Of a number, and the largest of it and others, the number is the least.

    So ``tf.math.bincount`` limits how many it counts.
    """
    require(node.shapes[0].rank == 0 and node.dtype(0).is_integer)
    for value, tensor in zip(
        numbers, reversed(node.operation.inputs), strict=True
    ):
        if tensor.op.type != "Maximum" or value.number is UNKNOWN:
            continue
        others = [node.scope.values[t.name].number for t in tensor.op.inputs]
        if any(value.number == other for other in others):
            known = np.array(value.number, object)
            whole = node.units.known_tensor(known, node.output_dtype())
            return [Value(REPLICATED, whole=unless_none(whole), known=known)]
    raise NotDivided


# ---- operations on ragged rows -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Partition:
    """What parts entries into rows: row splits, or the row of each entry.

    Attributes:
        local: the local tensor.
        rows: the layout of the rows.
        entries: the layout of the entries.
        lengths: the local lengths of the rows.
    """

    local: Tensor
    rows: Sharded
    entries: Sharded
    lengths: Tensor

    @classmethod
    def of(cls, units: Units, kind: bytes, value: Value) -> _Partition:
        """Return a partition of a kind of TensorFlow's."""
        builder = units.builder
        if kind == b"ROW_SPLITS":
            splits = _splits(value)
            count = builder.size_vector(
                [units.local_rows(splits.rows)], SIZE_DTYPE
            )
            starts = builder.op("Slice", [splits.local, [0], count], (None,))
            ends = _limits(builder, splits.local)
            lengths = builder.op("Sub", [ends, starts], (None,))
            return cls(splits.local, splits.rows, splits.entries, lengths)
        require(kind == b"VALUE_ROWIDS")
        numbers = unless_none(value.row_numbers)
        require(not numbers.is_first_column)
        rows, local = numbers.row_layout, numbers.local
        size = builder.cast(units.local_rows(rows), local.dtype)
        none = builder.constant([], local.dtype)
        lengths = builder.op("DenseBincount", [local, size, none], (None,))
        return cls(local, rows, numbers.layout, lengths)


@rule("RaggedTensorToTensor")
def _pad(
    node: Node, target: Value, entries: Value, default: Value, *ends: Value
) -> Values:
    """Pad ragged rows to a given length, or to the longest of all towers."""
    builder, units, converter = node.builder, node.units, node.converter
    kinds = node.attr("row_partition_types")
    of_kinds = list(zip(kinds, ends, strict=True))
    has_number = kinds[0] == b"FIRST_DIM_SIZE"
    parts = [
        _Partition.of(units, kind, end)
        for kind, end in (of_kinds[1:] if has_number else of_kinds)
    ]
    rows, layout, counts = parts[0].rows, parts[-1].entries, []
    for outer, inner in itertools.pairwise(parts):
        require(outer.entries == inner.rows)
    if has_number:
        require(ends[0].number == rows.size)
        counts = [builder.cast(units.local_rows(rows), node.dtype(3))]
    rank = unless_none(node.shapes[0].rank, SHAPE)
    sizes: list[Any] = target.entries if target.rank else [-1] * rank
    require(sizes[0] in (-1, rows.size) and UNKNOWN not in sizes, SHAPE)
    lengths = sizes[1 : len(parts) + 1]
    longest = [
        part.lengths
        for part, length in zip(parts, lengths, strict=True)
        if length == -1
    ]
    if longest:
        found = iter(_longest(node, longest))
        lengths = [next(found) if n == -1 else n for n in lengths]
    trailing = sizes[len(parts) + 1 :]
    own = [
        -1 if size == -1 else unless_none(units.global_size(size), SHAPE)
        for size in (-1, *lengths, *trailing)
    ]
    operands = [
        builder.size_vector(own, node.dtype(0)),
        converter.shard(entries, layout),
        converter.replicate(default),
        *counts,
        *[part.local for part in parts],
    ]
    if -1 in trailing:
        trailing = list(entries.sizes[1:])
    shape = [rows.size, *lengths, *trailing]
    return node.run_on_towers(operands, rows, shapes=[shape])


@shape_of("RaggedTensorToTensor")
def _padded_shape(node: Node, target: Value, *rest: Value) -> Shape:
    _, _, first, *_ = rest
    has_number = node.attr("row_partition_types")[0] == b"FIRST_DIM_SIZE"
    rows = first.number if has_number else first.sizes[0] - 1
    given = target.entries[0] if target.rank else -1
    others = unless_none(node.shapes[0].rank, SHAPE) - 1
    return (rows if given == -1 else given, *[UNKNOWN] * others)


def _longest(node: Node, lengths: Sequence[Tensor]) -> list[Dimension]:
    """Return the length of the longest row, by one exchange for all axes."""
    builder = node.builder
    most = [builder.op("Max", [each, [0]], ()) for each in lengths]
    most = [builder.cast(each, SIZE_DTYPE) for each in most]
    # Without rows, none is the longest.
    most = [builder.op("Maximum", [each, 0], ()) for each in most]
    own = builder.size_vector(most, SIZE_DTYPE)
    shared = node.converter.reduce_over_towers("Max", own, list(own.shape))
    whole = asserted(shared.whole)
    return [
        node.units.new_size(builder.vector_entry(whole, index))
        for index, _ in enumerate(lengths)
    ]


@rule("RaggedBincount")
def _count_in_rows(
    node: Node, ends: Value, entries: Value, size: Value, weights: Value
) -> Values:
    """Count in each row how often it has each number."""
    splits, converter = _splits(ends), node.converter
    is_weighted = weights.shape != (0,)
    operands = [
        splits.local,
        converter.shard(entries, splits.entries),
        converter.replicate(size),
        converter.shard(weights, splits.entries)
        if is_weighted
        else converter.replicate(weights),
    ]
    shape = [splits.rows.size, size.number]
    return node.run_on_towers(operands, splits.rows, shapes=[shape])


@rule("StringNGrams")
def _n_grams(node: Node, texts: Value, ends: Value) -> Values:
    """Join neighbours among the words of each row."""
    splits = _splits(ends)
    own = node.converter.shard(texts, splits.entries)
    found, limits = _copy_on_towers(node, [own, splits.local])
    after = splits_value(node.units, limits, ("parts", found), splits.rows)
    return [_entries(found, after), after]


@rule("RaggedRange")
def _places_in_rows(
    node: Node, starts: Value, limits: Value, steps: Value
) -> Values:
    """Number the entries of each row from one place to another."""
    builder, step = node.builder, steps.number
    first, last = _place(starts), _place(limits)
    require(first.entries == last.entries and first.rows == last.rows)
    # Of other rows a tower may have no entries.
    require(all(p.is_after and p.is_before for p in (first, last)))
    require(isinstance(step, int) and step > 0)
    operands = [first.local, last.local, node.converter.replicate(steps)]
    ends, own = _copy_on_towers(node, operands)
    splits = splits_value(node.units, ends, ("parts", own), first.rows)
    places, entries = _entries(own, splits), first.entries
    start = builder.scaled_size(entries.rows, entries.unit.start)
    local = builder.op("AddV2", [own, builder.cast(start, own.dtype)], (None,))
    numbers = RowNumbers(own, _splits(splits).entries, entries.unit)
    places.local = local
    places.meaning = dataclasses.replace(numbers, rows=entries.rows)
    return [splits, places]


@rule("UnicodeEncode")
def _encode_texts(node: Node, codes: Value, ends: Value) -> Values:
    """Join the characters of each row."""
    splits = _splits(ends)
    operands = [node.converter.shard(codes, splits.entries), splits.local]
    shape = [splits.rows.size]
    return node.run_on_towers(operands, splits.rows, shapes=[shape])


@rule("UnicodeDecode", "UnicodeDecodeWithOffsets")
def _decode_texts(node: Node, texts: Value) -> Values:
    """Decode each tower's texts."""
    rows, own = texts.as_rows()
    limits, *found = _copy_on_towers(node, [own])
    splits = splits_value(node.units, limits, ("parts", limits), rows)
    return [splits, *[_entries(part, splits) for part in found]]


def _entries(own: Tensor, splits: Value) -> Value:
    """Return the entries of the rows that splits are of."""
    layout = _splits(splits).entries
    return Value(layout, own, shape=(layout.size,))
