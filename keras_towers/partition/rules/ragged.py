"""Ragged rows: where they begin and end, how long they are, filled up."""

from __future__ import annotations

from keras_towers.partition.layouts import (
    REPLICATED,
    RowSplits,
    Sharded,
    Splits,
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
from keras_towers.partition.registry import by_places, numbers_of
from keras_towers.partition.rules.reductions import numbers
from keras_towers.partition.rules.repeats import lengths_of
from keras_towers.partition.sizes import ONE_MORE, Size, name_of
from keras_towers.partition.slices import index_of


def splits(partition: Partitioner, own: Tensor, layout: RowSplits) -> Value:
    """Return the splits of ragged rows that a program is given."""
    build, dtype = partition.builder, own.dtype
    last = build.op("Max", [own, build.constant([0], "int32")], ())
    unit = partition.found_unit(layout.unit, partition.cast(last, SIZE))
    begin, all_ = build.constant([1], SIZE), build.constant([-1], SIZE)
    ends = build.op("Slice", [own, begin, all_], (None,))
    start = partition.cast(unit.start, dtype)
    ends = build.op("AddV2", [ends, start], (None,))
    every = build.exchange("gather", ends)
    zero, along = build.constant([0], dtype), build.constant(0, "int32")
    whole = build.op("ConcatV2", [zero, every, along], (None,))
    one = build.constant(1, SIZE)
    partition.sizes[name_of(ONE_MORE)] = build.op(
        "AddV2", [partition.unit.total, one], ()
    )
    examples, numbers = partition.unit.size, Splits(own, unit)
    size = ONE_MORE if isinstance(examples, Size) else examples + 1
    return Value(REPLICATED, whole=whole, shape=(size,), numbers=numbers)


@numbers_of("StridedSlice")
def _part(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """All but the first, or all but the last."""
    given, ends = inputs[0].numbers, [numbers(value) for value in inputs[1:]]
    if not isinstance(given, Splits) or None in ends or given.part != "both":
        return
    index = index_of(node, *ends)
    if index == (slice(1, None, 1),):
        part = "end"
    elif index == (slice(None, -1, 1),):
        part = "begin"
    else:
        return
    locals_ = [partition.local(value) for value in inputs[1:]]
    (own,) = partition.builder.copy(node.operation, [given.own, *locals_])
    outputs[0].numbers = Splits(own, given.unit, part)
    outputs[0].shape = (partition.unit.size,)


@by_places("Sub")
def _lengths(
    partition: Partitioner, node: Node, ends: Value, begins: Value
) -> list[Value] | None:
    one, two = ends.numbers, begins.numbers
    if not isinstance(one, Splits) or not isinstance(two, Splits):
        return None
    if (one.part, two.part) != ("end", "begin") or one.unit is not two.unit:
        return None
    (local,) = partition.builder.copy(node.operation, [one.own, two.own])
    # As many as these are the entries.
    partition.note_unit(lengths_of(local), one.unit)
    shape = (partition.unit.size,)
    return [Value(Sharded(0, partition.unit), local, shape=shape)]


@by_places("RaggedTensorToTensor")
def _filled_up(
    partition: Partitioner,
    node: Node,
    target: Value,
    entries: Value,
    default: Value,
    *given: Value,
) -> list[Value] | None:
    """Rows that are filled up to a length that is known."""
    found, sizes = given[0].numbers, _sizes(partition, target)
    kinds = node.attr("row_partition_types")
    if not isinstance(found, Splits) or found.part != "both":
        return None
    if kinds != [b"ROW_SPLITS"] or sizes is None or not entries.shape:
        return None
    own = partition.rows(entries, Sharded(0, found.unit))
    if own is None or len(sizes) != len(entries.shape):
        return None
    layout, build = Sharded(0, partition.unit), partition.builder
    shape = (layout.size, sizes[0], *entries.shape[1:])
    own_target = build.constant([-1, *sizes], node.dtype(0))
    (local,) = build.copy(
        node.operation,
        [own_target, own, partition.local(default), found.own],
        [local_shape(static(shape), layout)],
    )
    return [Value(layout, local, shape=shape)]


def _sizes(partition: Partitioner, target: Value) -> list[int] | None:
    """What is known of a target of all rows, behind the first, or None."""
    if target.known is None or target.known.ndim != 1:
        return None
    number, *sizes = target.known
    if number not in (-1, partition.unit.size) or not sizes or sizes[0] == -1:
        return None
    return sizes if all(isinstance(size, int) for size in sizes) else None
