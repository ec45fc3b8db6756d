"""Ragged rows: where they begin, how long they are, and whose entries are.

Of the latter ``tf.repeat`` makes them along a first axis.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_towers.partition.layouts import (
    Sharded,
    Splits,
    Value,
    Values,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, notes, rule
from keras_towers.partition.rules.places import source
from keras_towers.partition.rules.reductions import numbers


@notes("StridedSlice")
def _part(
    partition: Partitioner, node: Node, inputs: Values, outputs: Values
) -> None:
    """All but the first, or all but the last."""
    splits, ends = inputs[0].numbers, [numbers(value) for value in inputs[1:]]
    if not isinstance(splits, Splits) or splits.part != "both":
        return
    masks = node.attr("begin_mask"), node.attr("end_mask")
    if masks == (0, 1) and (ends[0], ends[2]) == ([1], [1]):
        part = "end"
    elif masks == (1, 0) and ends[1:] == [[-1], [1]]:
        part = "begin"
    else:
        return
    local_ends = [partition.replicated(value) for value in inputs[1:]]
    (local,) = partition.builder.copy(
        node.operation, [splits.local, *local_ends]
    )
    outputs[0].numbers = Splits(local, splits.unit, part)
    outputs[0].shape = (partition.unit.size,)


@rule("Sub")
def _lengths(
    partition: Partitioner, node: Node, ends: Value, begins: Value
) -> list[Value] | None:
    last, first = ends.numbers, begins.numbers
    if not isinstance(last, Splits) or not isinstance(first, Splits):
        return None
    if (last.part, first.part) != (
        "end",
        "begin",
    ) or last.unit is not first.unit:
        return None
    layout = Sharded(0, partition.unit)
    lengths = partition.on_towers(node, [last.local, first.local], layout)
    # All rows together have as many entries as there are.
    partition.note_unit(("repeated", lengths[0].local), last.unit)
    return lengths


@rule("RaggedTensorToTensor")
def _filled_up(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """Rows that are filled up to a length that is known."""
    target, entries, default, splits_ = inputs[:4]
    splits, sizes = splits_.numbers, numbers(target)
    if not isinstance(splits, Splits) or splits.part != "both":
        return None
    # The number of rows is that of those that are given.
    if sizes is None or len(sizes) < 2 or sizes[0] != -1 or sizes[1] < 0:
        return None
    rows = partition.rows(entries, Sharded(0, splits.unit))
    if rows is None or node.attr("row_partition_types") != [b"ROW_SPLITS"]:
        return None
    all_have = [partition.replicated(value) for value in (target, default)]
    operands = [all_have[0], rows, all_have[1], splits.local]
    return partition.on_towers(node, operands, Sharded(0, partition.unit))


# ---- tf.repeat ---------------------------------------------------------------

# What a trace has of it: a mask leaves as many of each entry, repeated as often
# as the largest length says, as its length. A type comes before what is known
# of its inputs: names of tensors, numbers, or None.
_MOST = ("Maximum", None, ("Max", "all_lengths", 0))
_LENGTHS = ("BroadcastTo", ("Cast", "lengths"), None)
_TILED = ("Tile", ("ExpandDims", "entries", 1), ("Pack", 1, "most"))
_ENDS = ("Cast", ("ExpandDims", "all_lengths", -1))
_MASK = ("Less", ("Range", 0, "most", 1), _ENDS)
_PLACES = ("Squeeze", ("Where", ("Reshape", _MASK, None)))
_REPEAT = ("GatherV2", ("Reshape", _TILED, None), _PLACES, 0)


def repeated_rows(partition: Partitioner, node: Node) -> Value | None:
    """Return what each tower repeats of its own entries, if this does."""
    parts = _parts(node)
    if parts is None:
        return None
    layout = Sharded(0, partition.unit)
    entries, lengths = (
        partition.values.get(parts[name].name)
        for name in ("entries", "lengths")
    )
    if entries is None or lengths is None or lengths.layout != layout:
        return None
    if lengths.local is None or len(entries.shape or ()) != 1:
        return None
    rows = partition.rows(entries, layout)
    if rows is None:
        return None
    at = _entry_of_each(partition, lengths.local)
    key = "repeated", source(lengths.local)
    unit = partition.data_dependent_unit(key, partition.length(at))
    build, output = partition.builder, Sharded(0, unit)
    along = build.constant(0, tf.int32)
    local = build.op("GatherV2", [rows, at, along], (None,))
    result, places = Value(output, local, shape=(unit.size,)), entries.places
    if places is not None and places.layout == layout:
        local = build.op("GatherV2", [places.local, at, along], (None,))
        result.numbers = dataclasses.replace(places, local=local, layout=output)
    return result


def _entry_of_each(partition: Partitioner, lengths: Tensor) -> Tensor:
    """The number of the entry that is repeated, counted from a tower's own."""
    build, dtype = partition.builder, lengths.dtype
    zero, one = build.constant(0, dtype), build.constant(1, dtype)
    first, second = (build.constant(axis, tf.int32) for axis in (0, 1))
    most = build.op("Max", [lengths, first], (), keep_dims=False)
    most = build.op("Maximum", [most, zero], ())
    numbers = build.op("Range", [zero, most, one], (None,))
    ends = build.op("ExpandDims", [lengths, second], (None, 1))
    mask = build.op("Less", [numbers, ends], (None, None))
    at = build.op("Where", [mask], (None, 2))
    return build.op("GatherV2", [at, first, second], (None,))


def _parts(node: Node) -> dict[str, Any] | None:
    """The tensors of which it is made, by their names; None: it is not."""
    parts: dict[str, Any] = {}
    if node.shapes[0].rank != 1:
        return None
    if not _matches(node.operation, _REPEAT, parts):
        return None
    for name, pattern in (("most", _MOST), ("all_lengths", _LENGTHS)):
        if not _matches(parts[name].op, pattern, parts):
            return None
    is_exact = parts["lengths"].dtype in (tf.int32, tf.int64)
    return parts if is_exact else None


def _matches(operation: Any, pattern: Any, parts: dict[str, Any]) -> bool:
    """Whether an operation is as a pattern says; note what this names."""
    type_, *rest = pattern
    if operation.type != type_ or len(rest) > len(operation.inputs):
        return False
    for tensor, wanted in zip(operation.inputs, rest, strict=False):
        if isinstance(wanted, str):
            if parts.setdefault(wanted, tensor) is not tensor:
                return False
        elif isinstance(wanted, int):
            known = tf.get_static_value(tensor)
            if known is None or known.ravel().tolist() != [wanted]:
                return False
        elif wanted is not None and not _matches(tensor.op, wanted, parts):
            return False
    return True
