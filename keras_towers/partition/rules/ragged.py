"""Ragged rows: where they begin and end, and what is repeated for each."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.partition.layouts import (
    REPLICATED,
    FoundUnit,
    Lengths,
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
from keras_towers.partition.registry import AXES, by_places, numbers_of, rule
from keras_towers.partition.rules.places import followed
from keras_towers.partition.sizes import ONE_MORE, Size, name_of


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
    given = inputs[0].numbers
    if not isinstance(given, Splits) or given.part != "both":
        return
    masks = ("ellipsis", "new_axis", "shrink_axis")
    if any(node.attr(f"{name}_mask") for name in masks):
        return
    begin, end, step = (
        None if value.known is None else list(value.known)
        for value in inputs[1:]
    )
    opened = node.attr("begin_mask"), node.attr("end_mask")
    if step != [1] or given.unit is None:
        return
    if opened == (0, 1) and begin == [1]:
        part = "end"
    elif opened[1] == 0 and end == [-1] and (opened[0] or begin == [0]):
        part = "begin"
    else:
        return
    ends = [partition.local(value) for value in inputs[1:]]
    (own,) = partition.builder.copy(node.operation, [given.own, *ends])
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
    layout, shape = Sharded(0, partition.unit), (partition.unit.size,)
    (local,) = partition.builder.copy(node.operation, [one.own, two.own])
    numbers = Lengths(one.unit)
    return [Value(layout, local, shape=shape, numbers=numbers)]


@numbers_of("Cast", "BroadcastTo")
def _kept(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    (output,), value = outputs, inputs[0]
    if not isinstance(value.numbers, Lengths):
        return
    alike = output.layout == value.layout and output.shape == value.shape
    if alike and node.output_dtype(0).is_integer:
        output.numbers = value.numbers


# ---- tf.repeat ---------------------------------------------------------------


@rule("GatherV2", always=True)
def _picked(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    found = _repeated(partition, node)
    if found is not None:
        return [found]
    factors = AXES["GatherV2"](node, *inputs)
    if factors is None:
        return None
    return partition.divided(node, inputs, factors)


def _repeated(partition: Partitioner, node: Node) -> Value | None:
    """Each entry as often as a number says: those of a tower's own rows."""
    found = _of_repeat(node.operation)
    if found is None or node.output_rank() != 1:
        return None
    entries, lengths = (partition.values.get(t.name) for t in found)
    layout = Sharded(0, partition.unit)
    if entries is None or lengths is None or len(entries.shape or ()) != 1:
        return None
    if lengths.layout != layout or lengths.local is None:
        return None
    rows = partition.rows(entries, layout)
    if rows is None:
        return None
    at, unit = _rows_of_entries(
        partition, lengths, _origin(partition, found[1])
    )
    output = Sharded(0, unit)
    result = Value(output, _at(partition, rows, at), shape=(unit.size,))
    places = entries.places
    if places is not None and places.layout == layout:
        own = Value(output, _at(partition, places.own, at))
        result.numbers = followed(own, places)
    return result


def _at(partition: Partitioner, rows: Tensor, at: Tensor) -> Tensor:
    along = partition.builder.constant(0, "int32")
    return partition.builder.op("GatherV2", [rows, at, along], (None,))


def _rows_of_entries(
    partition: Partitioner, lengths: Value, key: Tensor | None
) -> tuple[Tensor, FoundUnit]:
    """The own row of each entry, counted from the first, and their unit."""
    build = partition.builder
    assert lengths.local is not None
    zero, one = build.constant(0, SIZE), build.constant(1, SIZE)
    along = build.constant(0, "int32")
    given = partition.cast(lengths.local, SIZE, is_repeated=False)
    given = build.op("Maximum", [given, zero], (None,))
    ends = build.op("Cumsum", [given, along], (None,))
    count = build.op("Sum", [given, along], (), keep_dims=False)
    if isinstance(lengths.numbers, Lengths):
        unit = lengths.numbers.unit
    else:
        unit = partition.found_unit(("repeated", key), count)
    numbers = build.op("Range", [zero, count, one], (None,))
    # The row of an entry is the first that ends behind it.
    pair = [
        build.op("ExpandDims", [t, along], (1, None)) for t in (ends, numbers)
    ]
    at = build.op("UpperBound", pair, (1, None), out_type=SIZE)
    return build.op("Reshape", [at, build.constant([-1], SIZE)], (None,)), unit


def _origin(partition: Partitioner, tensor: Any) -> Tensor | None:
    """Return the integers of which a tensor only is a copy."""
    value = partition.values[tensor.name]
    while tensor.op.type in ("BroadcastTo", "Cast"):
        dtypes = tensor.dtype, tensor.op.inputs[0].dtype
        before = partition.values[tensor.op.inputs[0].name]
        exact = all(d.is_integer and d.size >= 4 for d in dtypes)
        alike = before.layout == value.layout and before.shape == value.shape
        if not exact or not alike:
            break
        tensor, value = tensor.op.inputs[0], before
    return value.local


def _of_repeat(picking: Any) -> tuple[Any, Any] | None:
    """The entries and lengths of ``tf.repeat`` along a first axis, or None.

    It picks what a mask leaves of each entry, repeated as often as the largest
    length says.
    """
    tiled = _behind(picking.inputs[0], "Reshape", "Tile")
    mask = _behind(picking.inputs[1], "Squeeze", "Where", "Reshape", "Less")
    if tiled is None or mask is None:
        return None
    entries = _behind(tiled.inputs[0], "ExpandDims")
    times = _behind(tiled.inputs[1], "Pack")
    numbers = _behind(mask.inputs[0], "Range")
    limits = _behind(mask.inputs[1], "Cast", "ExpandDims")
    if limits is None:
        limits = _behind(mask.inputs[1], "ExpandDims")
    if None in (entries, times, numbers, limits):
        return None
    first, most, step = numbers.inputs
    largest = _behind(most, "Maximum")
    largest = largest and _behind(largest.inputs[1], "Max")
    if largest is None or largest.inputs[0] is not limits.inputs[0]:
        return None
    constants = (
        *((first, 0), (step, 1), (times.inputs[0], 1)),
        *((entries.inputs[1], 1), (limits.inputs[1], -1)),
        *((picking.inputs[2], 0), (largest.inputs[1], 0)),
    )
    for tensor, number in constants:
        known = tf.get_static_value(tensor)
        if known is None or known.ravel().tolist() != [number]:
            return None
    alike = len(times.inputs) == 2 and times.inputs[1] is most
    if not alike or picking.get_attr("batch_dims"):
        return None
    return entries.inputs[0], limits.inputs[0]


def _behind(tensor: Any, *types: str) -> Any:
    """Return the operation that is the last of a chain, or None."""
    operation = tensor.op
    for index, type_ in enumerate(types):
        if index:
            operation = operation.inputs[0].op
        if operation.type != type_:
            return None
    return operation


# ---- RaggedTensor.to_tensor --------------------------------------------------


@by_places("RaggedTensorToTensor")
def _padded(
    partition: Partitioner,
    node: Node,
    target: Value,
    entries: Value,
    default: Value,
    *given: Value,
) -> list[Value] | None:
    """Rows that are filled up to a length that is known."""
    found = given[0].numbers
    kinds = node.attr("row_partition_types")
    if not isinstance(found, Splits) or found.part != "both":
        return None
    if kinds != [b"ROW_SPLITS"] or target.known is None or not entries.shape:
        return None
    if not target.known.ndim:
        return None
    number, *sizes = target.known
    rank = len(entries.shape)
    if number not in (-1, partition.unit.size) or len(sizes) != rank:
        return None
    if not isinstance(sizes[0], int) or sizes[0] < 0:
        return None
    own = partition.rows(entries, Sharded(0, found.unit))
    if own is None or not all(isinstance(s, int) for s in sizes):
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
