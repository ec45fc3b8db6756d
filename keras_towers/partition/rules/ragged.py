"""Ragged rows: where they begin, how long they are, and whose entries are.

Of the latter ``tf.repeat`` makes them along a first axis.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import tensorflow as tf

from keras_towers.partition.layouts import (
    NotDivided,
    Sharded,
    Splits,
    Value,
    Values,
    require,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, notes, rule
from keras_towers.partition.rules.places import source
from keras_towers.partition.rules.reductions import numbers


@notes("StridedSlice")
def _part(node: Node, inputs: Values, outputs: Values) -> None:
    """All but the first, or all but the last."""
    partition = node.partition
    splits = _splits(inputs[0], "both")
    begin, end, stride = [numbers(value) for value in inputs[1:]]
    masks = node.attr("begin_mask"), node.attr("end_mask")
    is_end = masks == (0, 1) and begin == [1]
    require(is_end or (masks == (1, 0) and end == [-1]))
    require(stride == [1])
    local_ends = [partition.replicated(value) for value in inputs[1:]]
    (local,) = node.copy([splits.local, *local_ends])
    part = "end" if is_end else "begin"
    outputs[0].numbers = Splits(local, splits.unit, part)
    outputs[0].shape = (partition.unit.size,)


@rule("Sub")
def _lengths(node: Node, ends: Value, begins: Value) -> Values:
    partition = node.partition
    last, first = _splits(ends, "end"), _splits(begins, "begin")
    require(last.unit is first.unit)
    layout = Sharded(0, partition.unit)
    lengths = node.on_towers([last.local, first.local], layout)
    # All rows together have as many entries as there are.
    partition.units.setdefault(("repeated", lengths[0].local), last.unit)
    return lengths


@rule("RaggedTensorToTensor")
def _filled_up(node: Node, *inputs: Value) -> Values:
    """Rows that are filled up to a length that is known."""
    partition = node.partition
    require(node.attr("row_partition_types") == [b"ROW_SPLITS"])
    target, entries, default, ends = inputs
    splits, sizes = _splits(ends, "both"), numbers(target)
    # The number of rows is that of those that are given.
    require(len(sizes) > 1 and sizes[0] == -1 and sizes[1] >= 0)
    rows = partition.rows(entries, Sharded(0, splits.unit))
    shape, fill = map(partition.replicated, (target, default))
    operands = [shape, rows, fill, splits.local]
    return node.on_towers(operands, Sharded(0, partition.unit))


def _splits(value: Value, part: str) -> Splits:
    """Integers that are such a part of splits."""
    require(isinstance(value.numbers, Splits) and value.numbers.part == part)
    return cast("Splits", value.numbers)


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


def repeated_rows(node: Node) -> Value:
    """Return what each tower repeats of its own entries.

    Raises:
        NotDivided: if an operation does no such thing.
    """
    partition = node.partition
    parts = _parts(node)
    layout = Sharded(0, partition.unit)
    entries, lengths = (
        partition.values.get(parts[name].name)
        for name in ("entries", "lengths")
    )
    if entries is None or lengths is None:
        raise NotDivided
    of_lengths, own_lengths = lengths.as_rows()
    require(of_lengths == layout and entries.rank == 1)
    rows = partition.rows(entries, layout)
    at = _entry_of_each(partition, own_lengths)
    key = "repeated", source(own_lengths)
    unit = partition.data_dependent_unit(key, partition.length(at))
    output = Sharded(0, unit)
    local = partition.op("GatherV2", [rows, at, 0], (None,))
    result, places = Value(output, local, shape=(unit.size,)), entries.places
    if places is not None and places.layout == layout:
        local = partition.op("GatherV2", [places.local, at, 0], (None,))
        result.numbers = dataclasses.replace(places, local=local, layout=output)
    return result


def _entry_of_each(partition: Partitioner, lengths: Tensor) -> Tensor:
    """The number of the entry that is repeated, counted from a tower's own."""
    most = partition.op("Max", [lengths, 0], (), keep_dims=False)
    most = partition.op("Maximum", [most, 0], ())
    numbers = partition.op("Range", [0, most, 1], (None,))
    ends = partition.op("ExpandDims", [lengths, 1], (None, 1))
    mask = partition.op("Less", [numbers, ends], (None, None))
    at = partition.op("Where", [mask], (None, 2))
    return partition.op("GatherV2", [at, 0, 1], (None,))


def _parts(node: Node) -> dict[str, Any]:
    """The tensors of which it is made, by their names."""
    parts: dict[str, Any] = {}
    require(node.shapes[0].rank == 1)
    require(_matches(node.operation, _REPEAT, parts))
    for name, pattern in (("most", _MOST), ("all_lengths", _LENGTHS)):
        require(_matches(parts[name].op, pattern, parts))
    require(parts["lengths"].dtype in (tf.int32, tf.int64))
    return parts


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
