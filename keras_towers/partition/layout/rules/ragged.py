"""Ragged tensors: each row is the entries between two row splits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.builder import SIZE_DTYPE, static
from keras_towers.partition.ir.layouts import (
    REPLICATED,
    Shape,
    Sharded,
    local_shape,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import (
    SHAPE,
    NotDivided,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.ir.registry import operation
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension
from keras_towers.partition.ir.values import Value, Values
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules.row_numbers import (
    entry_numbers,
    sparse_rows,
    sparse_values,
)
from keras_towers.partition.layout.rules.row_splits import (
    copy_on_towers,
    limits_of,
    place_of,
    splits_of,
    splits_value,
)
from keras_towers.partition.layout.units import Units


@dataclasses.dataclass(frozen=True)
class _Partition:
    """A partition of entries into rows: row splits, or the row of each entry.

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
        """Return a partition, given TensorFlow's name for its kind."""
        builder = units.builder
        if kind == b"ROW_SPLITS":
            splits = splits_of(value)
            count = builder.size_vector(
                [units.local_rows(splits.rows)], SIZE_DTYPE
            )
            starts = builder.op("Slice", [splits.local, [0], count], (None,))
            ends = limits_of(builder, splits.local)
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


def _pad_rows(
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


def _padded_shape(node: Node, target: Value, *rest: Value) -> Shape:
    _, _, first, *_ = rest
    has_number = node.attr("row_partition_types")[0] == b"FIRST_DIM_SIZE"
    rows = first.number if has_number else first.sizes[0] - 1
    given = target.entries[0] if target.rank else -1
    others = unless_none(node.shapes[0].rank, SHAPE) - 1
    return (rows if given == -1 else given, *[UNKNOWN] * others)


def _longest(node: Node, lengths: Sequence[Tensor]) -> list[Dimension]:
    """Return the length of the longest row on all towers, by one exchange."""
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


def _count_in_rows(
    node: Node, ends: Value, entries: Value, size: Value, weights: Value
) -> Values:
    """Count how often each number occurs in each row."""
    splits, converter = splits_of(ends), node.converter
    operands = [
        splits.local,
        converter.shard(entries, splits.entries),
        converter.replicate(size),
        _local_weights(node, weights, splits.entries),
    ]
    shape = [splits.rows.size, size.number]
    return node.run_on_towers(operands, splits.rows, shapes=[shape])


def _local_weights(node: Node, weights: Value, rows: Sharded) -> Tensor:
    """Return the local weights of the entries; empty if there are none."""
    if weights.shape == (0,):
        return node.converter.replicate(weights)
    return node.converter.shard(weights, rows)


def _count_sparsely(
    node: Node, ends: Value, entries: Value, weights: Value
) -> Values:
    """Count the numbers that occur in each row, as a sparse tensor."""
    splits, builder = splits_of(ends), node.builder
    # It needs a row. One more without entries changes nothing.
    last = builder.op("Max", [splits.local, [0]], (1,), keep_dims=True)
    operands = [
        builder.op("ConcatV2", [splits.local, last, 0], (None,)),
        node.converter.shard(entries, splits.entries),
        _local_weights(node, weights, splits.entries),
    ]
    return sparse_rows(node, splits.rows, operands)


def _gather_rows(node: Node, *inputs: Value) -> Values:
    """Gather ragged rows: own ones by row numbers, or any by other indices."""
    *ends, entries, indices = inputs
    converter, numbers = node.converter, indices.row_numbers
    require(indices.rank == 1)
    if numbers is None:
        rows, own = indices.as_rows()
        require(all(v.is_replicated and not v.meaning for v in inputs[:-1]))
        operands = [converter.replicate(value) for value in inputs[:-1]]
    else:
        parts = [splits_of(value) for value in ends]
        wanted = numbers.row_layout
        for part in parts:
            require(part.rows == wanted)
            wanted = part.entries
        rows, own = numbers.layout, numbers.local
        operands = [part.local for part in parts]
        operands.append(converter.shard(entries, wanted))
    require(rows == Sharded(0, rows.unit, rows=rows.rows))
    trailing = entries.sizes[1:]
    shapes = [*[static((None,))] * len(ends), static((None, *trailing))]
    *limits, found = node.copy([*operands, own], shapes)
    results = []
    for own in limits:
        results.append(splits_value(node.units, own, rows))
        rows = splits_of(results[-1]).entries
    return [*results, Value(rows, found, shape=(rows.size, *trailing))]


def _n_grams(node: Node, texts: Value, ends: Value) -> Values:
    """Join neighbouring words of each row."""
    splits = splits_of(ends)
    own = node.converter.shard(texts, splits.entries)
    grams, limits = copy_on_towers(node, [own, splits.local])
    after = splits_value(node.units, limits, splits.rows)
    return [_entries(grams, after), after]


def _places_in_rows(
    node: Node, starts: Value, limits: Value, steps: Value
) -> Values:
    """Number the entries of each row, from one place in it to another."""
    builder, step = node.builder, steps.number
    first, last = place_of(starts), place_of(limits)
    require(first.entries == last.entries and first.rows == last.rows)
    # A tower may have no entries of other rows.
    require(all(p.is_after and p.is_before for p in (first, last)))
    require(isinstance(step, int) and step > 0)
    operands = [first.local, last.local, node.converter.replicate(steps)]
    ends, own = copy_on_towers(node, operands)
    splits = splits_value(node.units, ends, first.rows)
    layout = splits_of(splits).entries
    return [splits, entry_numbers(builder, own, layout, first.entries)]


def _encode_texts(node: Node, codes: Value, ends: Value) -> Values:
    """Join the characters of each row."""
    splits = splits_of(ends)
    operands = [node.converter.shard(codes, splits.entries), splits.local]
    shape = [splits.rows.size]
    return node.run_on_towers(operands, splits.rows, shapes=[shape])


def _decode_texts(node: Node, texts: Value) -> Values:
    """Decode each tower's texts."""
    rows, own = texts.as_rows()
    limits, *found = copy_on_towers(node, [own])
    splits = splits_value(node.units, limits, rows)
    return [splits, *[_entries(part, splits) for part in found]]


def _parse_examples(
    node: Node, texts: Value, names: Value, *others: Value
) -> Values:
    """Parse the sparse, dense and ragged features of each tower's examples."""
    layout, text = texts.as_rows()
    require(layout == Sharded(0, layout.unit, rows=layout.rows))
    require(names.shape == (0,))
    is_even = all(
        shape.is_fully_defined()
        for shape in map(tf.TensorShape, node.attr("dense_shapes"))
    )
    require(is_even, "{} pads features to the longest")
    operands = map(node.converter.replicate, (names, *others))
    sparse = node.attr("num_sparse")
    ragged = len(node.attr("ragged_value_types"))
    shapes = [local_shape(shape, layout) for shape in node.shapes]
    own = node.copy([text, *operands], shapes)
    found = [
        sparse_values(node, layout, *own[k : 3 * sparse : sparse])
        for k in range(sparse)
    ]
    results = [part for parts in zip(*found, strict=True) for part in parts]
    dense = own[3 * sparse : len(own) - 2 * ragged]
    results += [Value(layout, part) for part in dense]
    limits = own[len(own) - ragged :]
    splits = [splits_value(node.units, each, layout) for each in limits]
    entries = own[len(own) - 2 * ragged : len(own) - ragged]
    return [*results, *map(_entries, entries, splits), *splits]


def _entries(own: Tensor, splits: Value) -> Value:
    """Return the entries of the rows that some splits delimit."""
    layout = splits_of(splits).entries
    return Value(layout, own, shape=(layout.size,))


def least_number(node: Node, *numbers: Value) -> Values:
    """Return a minimum that is known to be the first number.

    It is the minimum of a number and of a maximum over that number:
    ``tf.math.bincount`` limits its counts so.
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


# ---- what is known of them ---------------------------------------------------

operation("RaggedTensorToTensor", _pad_rows, shape=_padded_shape)
operation("RaggedBincount", _count_in_rows)
operation("RaggedCountSparseOutput", _count_sparsely)
operation("RaggedGather", _gather_rows)
operation("RaggedRange", _places_in_rows)
operation("StringNGrams", _n_grams)
operation("ParseExampleV2", _parse_examples)
operation("UnicodeEncode", _encode_texts)
operation("UnicodeDecode UnicodeDecodeWithOffsets", _decode_texts)
