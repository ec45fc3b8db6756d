"""Integers that number rows: where they come from, and what is made of them.

One device's numbers are those of a tower, and how many rows the towers before
it have. An operation that only moves numbers is therefore done twice: to those
of one device, as to all integers, and to those that a tower counts from its own
first row. By the latter a tower picks its own rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.partition.layouts import (
    Below,
    Places,
    Sharded,
    Value,
    Values,
    require,
    static,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, notes, rule
from keras_towers.partition.rules.reductions import numbers
from keras_towers.partition.slice_spans import Span, spans

_MOVES = (
    "Reshape",
    "ExpandDims",
    "Squeeze",
    "Identity",
    "Cast",
    "Transpose",
    "Tile",
    "BroadcastTo",
    "StridedSlice",
    "Slice",
    "Unpack",
    "DynamicPartition",
    "GatherV2",
)
_ARITHMETIC = ("Mul", "FloorDiv", "AddV2", "Add", "Maximum")


# ---- where they come from ----------------------------------------------------


@rule("Where")
def _where(node: Node, mask: Value) -> Values:
    """Each tower finds what is true of its own rows."""
    partition = node.partition
    layout, local = mask.as_rows()
    require(not layout.axis and layout.blocks == 1)
    (indices,) = node.copy([local])
    unit = partition.data_dependent_unit(
        source(local), partition.length(indices)
    )
    rows = Sharded(0, unit)
    return [indices_of(partition, indices, rows, layout, mask.rank)]


def indices_of(
    partition: Partitioner, own: Tensor, rows: Sharded, of: Sharded, rank: int
) -> Value:
    """Return indices of entries, of which each tower has its own.

    Args:
        partition: lays out operations.
        own: of each tower: its indices, counted from its own first row.
        rows: how they are laid out.
        of: the layout of what they are indices of, along its first axis.
        rank: the number of its axes.
    """
    start = partition.times(of.rows, of.unit.start)
    ahead = partition.along(0, rank, start, 0)
    numbers = partition.op("AddV2", [own, ahead], own.shape)
    places = Places(own, rows, of.unit, of.rows, is_first_column=rank > 1)
    return Value(rows, numbers, shape=(rows.size, rank), numbers=places)


@notes("Range")
def _range(node: Node, inputs: Values, outputs: Values) -> None:
    """All rows of a unit, each once, or every so many of them."""
    partition = node.partition
    first, last, step = (value.number for value in inputs)
    rows = partition.rows_along(0, last)
    if first != 0 or rows is None or not isinstance(step, int) or step < 1:
        return
    dtype = node.output_dtype(0)
    if rows.rows % step or not dtype.is_integer:
        return
    count = partition.times(rows.rows, rows.unit.count)
    count = partition.cast(count, dtype)
    numbers = partition.op("Range", [0, count, step], (None,))
    layout = Sharded(0, rows.unit, rows=rows.rows // step)
    outputs[0].numbers = Places(numbers, layout, rows.unit, rows.rows, step)
    outputs[0].shape = (layout.size,)


@rule("DynamicPartition")
def _parted(node: Node, values: Value, parts: Value) -> Values:
    """Each tower parts its own rows."""
    partition = node.partition
    layout, own_parts = parts.as_rows()
    require(not layout.axis and layout.blocks == 1)
    rows, behind = partition.rows(values, layout), values.sizes[parts.rank :]
    shape = static((None, *behind))
    found = node.copy([rows, own_parts], [shape] * node.num_outputs)
    results = []
    for index, local in enumerate(found):
        key = source(own_parts), index
        unit = partition.data_dependent_unit(key, partition.length(local))
        sizes = (unit.size, *behind)
        results.append(Value(Sharded(0, unit), local, shape=sizes))
    return results


# ---- integers that are known to be below a limit -----------------------------


@notes("ArgMax", "ArgMin", "TopKV2", "ZerosLike")
def _limited(node: Node, inputs: Values, outputs: Values) -> None:
    """Indices along an axis, or zeros."""
    limit: Any = 1
    if node.type != "ZerosLike":
        axis = -1 if node.type == "TopKV2" else numbers(inputs[1])[0]
        limit = (inputs[0].shape or (None,))[axis]
    is_integer = node.output_dtype(len(outputs) - 1).is_integer
    if is_integer and isinstance(limit, int):
        outputs[-1].numbers = Below(limit)


def _is_below(value: Value, limit: int) -> bool:
    """Whether integers are at least 0 and less than a limit."""
    if isinstance(value.numbers, Below):
        return value.numbers.limit <= limit
    return all(0 <= entry < limit for entry in numbers(value))


# ---- what is made of them ----------------------------------------------------


@notes(*_MOVES, *_ARITHMETIC, "Pack", "ConcatV2")
def _made_of_numbers(node: Node, inputs: Values, outputs: Values) -> None:
    """Do to what towers number of their own what is done to the numbers."""
    for at, value in enumerate(inputs):
        before = value.numbers
        if isinstance(before, Below) and node.type in _MOVES and not at:
            for output in outputs:
                output.numbers = before if _is_exact(node, at) else None
        changes = _changes(node, inputs, at)
        if not isinstance(before, Places) or changes is None:
            continue
        numbered = list(inputs)
        numbered[at] = Value(before.layout, before.local, shape=value.shape)
        results = _without_exchange(node, numbered)
        for moved, output in zip(results, outputs, strict=False):
            if moved.sharded is not None and moved.local is not None:
                output.numbers = dataclasses.replace(
                    before, local=moved.local, layout=moved.sharded, **changes
                )
        return


def _without_exchange(node: Node, inputs: Values) -> Values:
    """Lay out an operation on what towers number of their own.

    What is exchanged counts from the first rows of several towers.
    """
    partition = node.partition
    exchanges = len(partition.exchanges)
    outputs = partition.by_rule(node, inputs)
    require(len(partition.exchanges) == exchanges)
    return outputs


def _is_exact(node: Node, at: int) -> bool:
    """Whether all numbers of rows stay what they are."""
    return all(
        dtype.is_integer and dtype.size >= 4
        for dtype in (node.dtype(at), node.output_dtype(0))
    )


def _changes(node: Node, inputs: Values, at: int) -> dict[str, Any] | None:
    """What becomes of the rows that are numbered; None: they are none."""
    places = inputs[at].places
    if places is None or not _is_exact(node, at):
        return None
    if node.type in _ARITHMETIC and not places.is_first_column:
        is_divisor = at == 1 and node.type == "FloorDiv"
        return None if is_divisor else _computed(node, places, inputs[1 - at])
    if at or (node.type == "GatherV2" and numbers(inputs[2]) != [0]):
        return None
    if places.is_first_column:
        if node.type == "StridedSlice" and _takes_first_column(node, inputs):
            return {"is_first_column": False}
        return {} if node.type in ("Cast", "Identity") else None
    if node.type in _MOVES:
        return {}
    return {"is_first_column": True} if _becomes_column(node, inputs) else None


def _takes_first_column(node: Node, inputs: Values) -> bool:
    shape, ends = inputs[0].shape or (), [v.known for v in inputs[1:]]
    if any(end is None for end in ends):
        return False
    taken = spans(node, shape, *ends)
    return taken[-1:] == [Span(len(shape) - 1, 0, 1, dropped=True)]


def _becomes_column(node: Node, inputs: Values) -> bool:
    """Whether tensors become columns, and the first of them is one."""
    rank, is_pack = node.shapes[0].rank or 0, node.type == "Pack"
    axis = node.attr("axis") if is_pack else numbers(inputs[-1])[0]
    if rank < 2 or axis % rank != rank - 1:
        return False
    return is_pack or (inputs[0].shape or ())[-1:] == (1,)


def _computed(
    node: Node, places: Places, other: Value
) -> dict[str, Any] | None:
    """Numbers of rows that consist of others, or that these consist of."""
    if node.type in ("AddV2", "Add"):
        return {"grain": 1} if _is_below(other, places.grain) else None
    if node.type == "Maximum":
        return {} if _is_below(other, 1) else None
    by, *more = numbers(other)
    if more or by < 1:
        return None
    rows, grain = places.rows, places.grain
    if node.type == "Mul":
        return {"rows": rows * by, "grain": grain * by}
    if rows % by:
        return None
    return {"rows": rows // by, "grain": 1 if grain % by else grain // by}


# ---- tensors of a tower ------------------------------------------------------


def source(tensor: Tensor) -> Tensor:
    """Return what has the same entries in the same order."""
    moving = ("Reshape", "Identity", "ExpandDims", "Squeeze")
    while tensor.operation is not None and tensor.operation.type in moving:
        tensor = tensor.operation.inputs[0]
    return tensor
