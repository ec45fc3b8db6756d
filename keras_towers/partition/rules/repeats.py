"""``tf.repeat`` along a first axis: each entry as often as a number says."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_towers.partition.layouts import Sharded, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.rules.places import first_size, source

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


def lengths_of(tensor: Tensor) -> Any:
    """Return what is the same for what is repeated as often."""
    return "repeated", source(tensor)


def repeated(partition: Partitioner, node: Node) -> Value | None:
    """Return what each tower repeats of its own entries, if this does."""
    found = _parts(node)
    if found is None:
        return None
    layout = Sharded(0, partition.unit)
    entries, lengths = (
        partition.values.get(found[name].name)
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
    unit = partition.found_unit(
        lengths_of(lengths.local), first_size(partition, at)
    )
    output = Sharded(0, unit)
    result = Value(output, _at(partition, rows, at), shape=(unit.size,))
    places = entries.places
    if places is not None and places.layout == layout:
        own = _at(partition, places.own, at)
        result.numbers = dataclasses.replace(places, own=own, layout=output)
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


def _at(partition: Partitioner, rows: Tensor, at: Tensor) -> Tensor:
    along = partition.builder.constant(0, tf.int32)
    return partition.builder.op("GatherV2", [rows, at, along], (None,))


def _parts(node: Node) -> dict[str, Any] | None:
    """The tensors of which it is made, by their names; None: it is not."""
    found: dict[str, Any] = {}
    if node.output_rank() != 1:
        return None
    if not _matches(node.operation, _REPEAT, found):
        return None
    for name, pattern in (("most", _MOST), ("all_lengths", _LENGTHS)):
        if not _matches(found[name].op, pattern, found):
            return None
    return found if found["lengths"].dtype.is_integer else None


def _matches(operation: Any, pattern: Any, found: dict[str, Any]) -> bool:
    """Whether an operation is as a pattern says; note what this names."""
    type_, *rest = pattern
    if operation.type != type_ or len(rest) > len(operation.inputs):
        return False
    for tensor, wanted in zip(operation.inputs, rest, strict=False):
        if isinstance(wanted, str):
            if found.setdefault(wanted, tensor) is not tensor:
                return False
        elif isinstance(wanted, int):
            known = tf.get_static_value(tensor)
            if known is None or known.ravel().tolist() != [wanted]:
                return False
        elif wanted is not None and not _matches(tensor.op, wanted, found):
            return False
    return True
