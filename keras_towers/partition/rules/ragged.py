"""Ragged rows: their splits and lengths, and ``tf.repeat``.

TensorFlow computes the row of each entry of a ragged tensor by ``tf.repeat``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import tensorflow as tf

from keras_towers.partition.layouts import (
    RaggedSplits,
    Sharded,
    Value,
    Values,
    known_ints,
    require,
    required,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, notes, rule
from keras_towers.partition.rules.row_numbers import skip_reshapes


@notes("StridedSlice")
def _note_part_of_splits(node: Node, inputs: Values, outputs: Values) -> None:
    """Note the row starts or row limits among the row splits."""
    partitioner = node.partitioner
    splits = _splits(inputs[0], "row_splits")
    begin, end, stride = [known_ints(value) for value in inputs[1:]]
    masks = node.attr("begin_mask"), node.attr("end_mask")
    is_end = masks == (0, 1) and begin == [1]
    require(is_end or (masks == (1, 0) and end == [-1]))
    require(stride == [1])
    local_ends = [partitioner.replicate(value) for value in inputs[1:]]
    (local,) = node.copy([splits.local, *local_ends])
    kind = "row_limits" if is_end else "row_starts"
    outputs[0].meaning = RaggedSplits(local, splits.unit, kind)
    outputs[0].shape = (partitioner.unit.size,)


@rule("Sub")
def _row_lengths(node: Node, ends: Value, begins: Value) -> Values:
    partitioner = node.partitioner
    last, first = _splits(ends, "row_limits"), _splits(begins, "row_starts")
    require(last.unit is first.unit)
    layout = Sharded(0, partitioner.unit)
    lengths = node.run_on_towers([last.local, first.local], layout)
    # The lengths of all rows add up to the number of entries.
    partitioner.alias_unit(("repeated", lengths[0].local), last.unit)
    return lengths


@rule("RaggedTensorToTensor")
def _ragged_to_tensor(node: Node, *inputs: Value) -> Values:
    """Pad ragged rows to a known length."""
    partitioner = node.partitioner
    require(node.attr("row_partition_types") == [b"ROW_SPLITS"])
    target, entries, default, ends = inputs
    splits, sizes = _splits(ends, "row_splits"), known_ints(target)
    # The number of rows is not given, but taken from the splits.
    require(len(sizes) > 1 and sizes[0] == -1 and sizes[1] >= 0)
    rows = partitioner.shard(entries, Sharded(0, splits.unit))
    shape, fill = map(partitioner.replicate, (target, default))
    operands = [shape, rows, fill, splits.local]
    return node.run_on_towers(operands, Sharded(0, partitioner.unit))


def _splits(value: Value, kind: str) -> RaggedSplits:
    """Return the splits of a value, if they are of this kind."""
    require(
        isinstance(value.meaning, RaggedSplits) and value.meaning.kind == kind
    )
    return cast("RaggedSplits", value.meaning)


# ---- tf.repeat ---------------------------------------------------------------

# ``tf.repeat`` in a trace: each entry is tiled to the largest length, and a
# mask keeps the copies up to its length. A pattern is the type of an operation,
# then one item per input: a nested pattern, a name to bind, a constant, or None
# for anything.
_MOST = ("Maximum", None, ("Max", "all_lengths", 0))
_LENGTHS = ("BroadcastTo", ("Cast", "lengths"), None)
_TILED = ("Tile", ("ExpandDims", "entries", 1), ("Pack", 1, "most"))
_ENDS = ("Cast", ("ExpandDims", "all_lengths", -1))
_MASK = ("Less", ("Range", 0, "most", 1), _ENDS)
_PLACES = ("Squeeze", ("Where", ("Reshape", _MASK, None)))
_REPEAT = ("GatherV2", ("Reshape", _TILED, None), _PLACES, 0)


def repeat_rows(node: Node) -> Value:
    """Repeat each tower's own entries, as ``tf.repeat`` does.

    Raises:
        NotDivided: the operation is not the last one of ``tf.repeat``.
    """
    partitioner = node.partitioner
    parts = _match_repeat(node)
    layout = Sharded(0, partitioner.unit)
    entries, lengths = (
        required(partitioner.values.get(parts[name].name))
        for name in ("entries", "lengths")
    )
    of_lengths, own_lengths = lengths.as_rows()
    require(of_lengths == layout and entries.rank == 1)
    rows = partitioner.shard(entries, layout)
    at = _source_indices(partitioner, own_lengths)
    key = "repeated", skip_reshapes(own_lengths)
    unit = partitioner.data_dependent_unit(key, partitioner.axis_size(at))
    output = Sharded(0, unit)
    local = partitioner.op("GatherV2", [rows, at, 0], (None,))
    result = Value(output, local, shape=(unit.size,))
    rows_of = entries.row_numbers
    if rows_of is not None and rows_of.layout == layout:
        local = partitioner.op("GatherV2", [rows_of.local, at, 0], (None,))
        result.meaning = dataclasses.replace(
            rows_of, local=local, layout=output, are_all=False
        )
    return result


def _source_indices(partitioner: Partitioner, lengths: Tensor) -> Tensor:
    """Return for each repeated entry the local index of the original."""
    most = partitioner.op("Max", [lengths, 0], (), keep_dims=False)
    most = partitioner.op("Maximum", [most, 0], ())
    numbers = partitioner.op("Range", [0, most, 1], (None,))
    ends = partitioner.op("ExpandDims", [lengths, 1], (None, 1))
    mask = partitioner.op("Less", [numbers, ends], (None, None))
    at = partitioner.op("Where", [mask], (None, 2))
    return partitioner.op("GatherV2", [at, 0, 1], (None,))


def _match_repeat(node: Node) -> dict[str, Any]:
    """Return the tensors of ``tf.repeat`` by the names in the patterns."""
    parts: dict[str, Any] = {}
    require(node.shapes[0].rank == 1)
    require(_match(node.operation, _REPEAT, parts))
    for name, pattern in (("most", _MOST), ("all_lengths", _LENGTHS)):
        require(_match(parts[name].op, pattern, parts))
    require(parts["lengths"].dtype in (tf.int32, tf.int64))
    return parts


def _match(operation: Any, pattern: Any, parts: dict[str, Any]) -> bool:
    """Whether an operation matches a pattern; bind the names in it."""
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
        elif wanted is not None and not _match(tensor.op, wanted, parts):
            return False
    return True
