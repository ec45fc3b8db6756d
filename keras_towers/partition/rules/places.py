"""Integers that number rows: where they come from, and what is made of them.

One device's numbers are those of a tower, and how many rows the towers before
it have. An operation that only moves numbers is therefore done twice: to those
of one device, as to all integers, and to those that a tower counts from its own
first row. By the latter a tower picks its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.builder import NeedsExchange
from keras_towers.partition.layouts import (
    Below,
    Places,
    Sharded,
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
from keras_towers.partition.registry import by_places, numbers_of, rule
from keras_towers.partition.rules.reductions import numbers
from keras_towers.partition.sizes import UNKNOWN
from keras_towers.partition.slices import spans

# They make the same entries of the same rows of other shapes.
_RESHAPING = ("Reshape", "ExpandDims", "Squeeze", "Identity", "Snapshot")
_REPEATING = ("Tile", "BroadcastTo", "StridedSlice", "Slice", "Transpose")


# ---- where they come from ----------------------------------------------------


@rule("Where")
def _where(
    partition: Partitioner, node: Node, mask: Value
) -> list[Value] | None:
    """Each tower finds what is true of its own rows."""
    layout, local, shape = mask.sharded, mask.local, mask.shape
    if layout is None or local is None or shape is None:
        return None
    if layout.axis or layout.blocks != 1:
        return None
    (own,) = partition.builder.copy(node.operation, [local])
    unit = partition.found_unit(source(local), first_size(partition, own))
    return [indices_of(partition, own, Sharded(0, unit), layout, len(shape))]


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
    build = partition.builder
    start = partition.times(of.rows, of.unit.start)
    ahead = [start, *[build.constant(0, SIZE)] * (rank - 1)]
    numbers = build.op("AddV2", [own, partition.vector(ahead, SIZE)], own.shape)
    places = Places(own, rows, of.unit, of.rows, is_first_column=rank > 1)
    return Value(rows, numbers, shape=(rows.size, rank), numbers=places)


@numbers_of("Range")
def _range(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """All rows of a unit, each once, or every so many of them."""
    ends = [
        None if value.known is None else value.known.flat[0] for value in inputs
    ]
    first, last, step = ends
    rows = partition.rows_along(0, last)
    if first != 0 or rows is None or not isinstance(step, int) or step < 1:
        return
    build, dtype = partition.builder, node.output_dtype(0)
    if rows.rows % step or not dtype.is_integer:
        return
    count = partition.times(rows.rows, rows.unit.count)
    begin, delta = build.constant(0, dtype), build.constant(step, dtype)
    own = build.op(
        "Range", [begin, partition.cast(count, dtype), delta], (None,)
    )
    layout = Sharded(0, rows.unit, rows=rows.rows // step)
    outputs[0].numbers = Places(own, layout, rows.unit, rows.rows, step)
    outputs[0].shape = (layout.size,)


@numbers_of("ArgMax", "ArgMin", "TopKV2")
def _of_axis(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """Indices along an axis."""
    value, along = inputs
    axes = [-1] if node.type == "TopKV2" else numbers(along)
    if value.shape is None or axes is None:
        return
    size = value.shape[axes[0]]
    if isinstance(size, int):
        outputs[-1].numbers = Below(size)


def picked_from(values: Value, places: Value, axis: int) -> None:
    """Note that indices are known to be inside of an axis: one has picked."""
    size = None if values.shape is None else values.shape[axis]
    if isinstance(size, int) and places.numbers is None:
        places.numbers = Below(size)


@rule("DynamicPartition")
def _parted(
    partition: Partitioner, node: Node, values: Value, parts: Value
) -> list[Value] | None:
    """Each tower parts its own rows."""
    layout, rank = parts.sharded, len(parts.shape or ())
    if layout is None or layout.axis or layout.blocks != 1:
        return None
    rows = partition.rows(values, layout)
    if rows is None or parts.local is None or values.shape is None:
        return None
    locals_ = partition.builder.copy(
        node.operation,
        [rows, parts.local],
        [static_rows(values.shape[rank:])] * node.num_outputs,
    )
    results = []
    for index, local in enumerate(locals_):
        key = source(parts.local), index
        unit = partition.found_unit(key, first_size(partition, local))
        own = Sharded(0, unit)
        shape = (own.size, *values.shape[rank:])
        results.append(Value(own, local, shape=shape))
    return results


@numbers_of("DynamicPartition")
def _parted_places(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    places = inputs[0].places
    if places is None or places.is_first_column:
        return
    found = again(partition, node, inputs, 0)
    if found is None:
        return
    for own, value in zip(found, outputs, strict=True):
        value.numbers = followed(own, places)


# ---- what is made of them ----------------------------------------------------


def again(
    partition: Partitioner, node: Node, inputs: Sequence[Value], at: int
) -> list[Value] | None:
    """Do to what towers number of their own what is done to the numbers.

    Args:
        partition: lays out operations.
        node: the operation.
        inputs: its inputs.
        at: which of them numbers rows.
    """
    places = inputs[at].places
    if places is None:
        return None
    given = list(inputs)
    given[at] = Value(places.layout, places.own, shape=inputs[at].shape)
    exchanges = len(partition.builder.exchanges)
    try:
        found = partition.by_rule(node, given)
    except NeedsExchange:
        return None
    # What is exchanged counts from the first rows of several towers.
    if len(partition.builder.exchanges) != exchanges:
        return None
    return found


def followed(own: Value, before: Places, **changes: Any) -> Places | None:
    """Return the numbers that follow from others, if these are of rows."""
    if own.sharded is None or own.local is None:
        return None
    return dataclasses.replace(
        before, own=own.local, layout=own.sharded, **changes
    )


@numbers_of(*_RESHAPING, *_REPEATING, "Cast", "Unpack")
def _moved(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """Numbers that are put elsewhere, repeated, or left out."""
    before = inputs[0].numbers
    if before is None or outputs[0] is inputs[0] or not _is_exact(node):
        return
    if isinstance(before, Below):
        for value in outputs:
            value.numbers = before
    if not isinstance(before, Places):
        return
    changes: Any = {}
    if before.is_first_column:
        left = _columns(node, inputs, outputs[0])
        if left is None:
            return
        changes["is_first_column"] = left > 1
        outputs = outputs[:1]
    found = again(partition, node, inputs, 0)
    for own, value in zip(found or (), outputs, strict=False):
        value.numbers = followed(own, before, **changes)


def _is_exact(node: Node) -> bool:
    """Whether all numbers of rows stay what they are."""
    return all(
        dtype.is_integer and dtype.size >= 4
        for dtype in (node.dtype(0), node.output_dtype(0))
    )


def _columns(node: Node, inputs: list[Value], output: Value) -> int | None:
    """How many columns are left, the first one among them; or None."""
    before, after = inputs[0].shape or (), output.shape or ()
    if node.type in ("Cast", "BroadcastTo", *_RESHAPING):
        alike = before[-1:] == after[-1:] and isinstance(after[-1], int)
        return after[-1] if alike else None
    if node.type == "Unpack":
        along = node.attr("axis") % len(before)
        return 1 if along == len(before) - 1 else None
    if node.type != "StridedSlice":
        return None
    taken = spans(node, before, *[value.known for value in inputs[1:]])
    last = next((s for s in taken or () if s.axis == len(before) - 1), None)
    if last is None or taken is None or taken[-1] is not last:
        return None
    size = before[-1] if last.size is None else last.size
    return size if last.begin == 0 and isinstance(size, int) else None


@numbers_of("Pack", "ConcatV2")
def _joined(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """Numbers of rows beside others, as columns."""
    places, rank = inputs[0].places, node.output_rank() or 0
    if places is None or rank < 2:
        return
    if node.type == "Pack":
        axis, width = node.attr("axis"), 1
    else:
        axis = (numbers(inputs[-1]) or [0])[0]
        width = (inputs[0].shape or (None,))[-1]
    if axis % rank != rank - 1 or not isinstance(width, int):
        return
    # Of several columns only the first may number rows.
    if width != 1 and not places.is_first_column:
        return
    found = again(partition, node, inputs, 0)
    if found is not None:
        outputs[0].numbers = followed(found[0], places, is_first_column=True)


@numbers_of("ZerosLike", "FloorMod")
def _limited(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    if not node.output_dtype(0).is_integer:
        return
    factors = numbers(inputs[-1]) if node.type == "FloorMod" else [1]
    if factors and len(factors) == 1 and factors[0] >= 1:
        outputs[0].numbers = Below(factors[0])


@numbers_of("Mul", "FloorDiv", "AddV2", "Add", "Maximum")
def _computed(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """Numbers of rows that consist of others, or that these consist of."""
    for at, other in ((0, 1), (1, 0)):
        places, rest = inputs[at].places, inputs[other]
        if node.type == "FloorDiv" and at:
            return
        if places is not None and not places.is_first_column:
            changes = _arithmetic(node, places, rest)
            if changes is None:
                continue
            found = again(partition, node, inputs, at)
            if found is not None:
                outputs[0].numbers = followed(found[0], places, **changes)
            return


def _arithmetic(node: Node, places: Places, rest: Value) -> Any:
    """What becomes of the rows that are numbered; None: they are none."""
    factors = numbers(rest)
    by = factors[0] if factors and len(factors) == 1 else 0
    if node.type in ("AddV2", "Add"):
        return {"grain": 1} if _is_below(rest, places.grain) else None
    if node.type == "Maximum":
        return {} if _is_below(rest, 1) else None
    if by < 1:
        return None
    if node.type == "Mul":
        return {"rows": places.rows * by, "grain": places.grain * by}
    if node.type == "FloorDiv" and not places.rows % by:
        exact = not places.grain % by
        grain = places.grain // by if exact else 1
        return {"rows": places.rows // by, "grain": grain}
    return None


def _is_below(value: Value, limit: int) -> bool:
    """Whether integers are at least 0 and less than a limit."""
    if isinstance(value.numbers, Below):
        return value.numbers.limit <= limit
    found = numbers(value)
    return found is not None and all(0 <= entry < limit for entry in found)


# ---- what is picked by them, and put there -----------------------------------


@by_places("GatherV2")
def _picked(
    partition: Partitioner,
    node: Node,
    values: Value,
    places: Value,
    along: Value,
) -> list[Value] | None:
    found, axes, rank = places.places, numbers(along), node.rank(0)
    if found is None or found.is_first_column or axes is None or not rank:
        return None
    axis = axes[0] % rank
    if node.attr("batch_dims") or places.shape is None or not values.shape:
        return None
    if values.sharded != found.target.along(axis) or values.local is None:
        return None
    layout = found.layout.along(axis + found.layout.axis)
    shape = (*values.shape[:axis], *places.shape, *values.shape[axis + 1 :])
    (local,) = partition.builder.copy(
        node.operation,
        [values.local, found.own, partition.local(along)],
        [local_shape(static(shape), layout)],
    )
    return [Value(layout, local, shape=shape)]


@numbers_of("GatherV2")
def _picked_numbers(
    partition: Partitioner,
    node: Node,
    inputs: list[Value],
    outputs: list[Value],
) -> None:
    """Numbers that are picked are the same numbers."""
    values, places, along = inputs
    axes, rank, batch = numbers(along), node.rank(0), node.attr("batch_dims")
    if axes is None or not rank:
        return
    axis = axes[0] % rank
    if axis == batch > 0:
        picked_from(values, places, axis)
    if isinstance(values.numbers, Below):
        outputs[0].numbers = values.numbers
    own = values.places
    if own is None or own.is_first_column or places.places is None or axis:
        return
    found = again(partition, node, inputs, 0)
    if found is not None:
        outputs[0].numbers = followed(found[0], own)


def indexed(places: Value) -> Places | None:
    """The rows that indices number along the first axis of a tensor."""
    found, shape = places.places, places.shape
    if found is None or not shape or found.layout.axis == len(shape) - 1:
        return None
    alone = found.is_first_column or shape[-1] == 1
    return found if alone else None


@by_places("GatherNd")
def _picked_at(
    partition: Partitioner, node: Node, values: Value, places: Value
) -> list[Value] | None:
    found, shape = indexed(places), places.shape
    if found is None or not values.shape or not shape:
        return None
    if values.sharded != found.target or values.local is None:
        return None
    if not isinstance(shape[-1], int):
        return None
    shape = (*shape[:-1], *values.shape[shape[-1] :])
    (local,) = partition.builder.copy(
        node.operation,
        [values.local, found.own],
        [local_shape(static(shape), found.layout)],
    )
    return [Value(found.layout, local, shape=shape)]


@by_places("ScatterNd")
def _put(
    partition: Partitioner,
    node: Node,
    places: Value,
    rows: Value,
    target: Value,
) -> list[Value] | None:
    found, sizes = indexed(places), target.known
    own = None if found is None else partition.rows(rows, found.layout)
    if found is None or own is None or sizes is None:
        return None
    layout = found.target
    if sizes[0] != layout.size or sizes[0] is UNKNOWN:
        return None
    shape = tuple(None if size is UNKNOWN else size for size in sizes)
    (local,) = partition.builder.copy(
        node.operation,
        [found.own, own, partition.local_target(target, shape, layout)],
        [local_shape(static(shape), layout)],
    )
    return [Value(layout, local, shape=shape)]


@by_places(
    *("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"),
    *("TensorScatterMax", "TensorScatterMin"),
)
def _put_into(
    partition: Partitioner,
    node: Node,
    values: Value,
    places: Value,
    rows: Value,
) -> list[Value] | None:
    found = indexed(places)
    own = None if found is None else partition.rows(rows, found.layout)
    if found is None or own is None or values.sharded != found.target:
        return None
    given = [t for t in (values.local, found.own, own) if t is not None]
    (local,) = partition.builder.copy(
        node.operation,
        given,
        [local_shape(static(values.shape or ()), found.target)],
    )
    return [Value(found.target, local, shape=values.shape)]


@by_places("DynamicStitch", "ParallelDynamicStitch")
def _stitched(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    """What was parted is joined by the parts of the numbers of all rows."""
    half = len(inputs) // 2
    places = [value.places for value in inputs[:half]]
    found = [own for own in places if own is not None]
    if len(found) < half or not _are_all(found):
        return None
    ranks = {len(value.shape or ()) for value in inputs[:half]}
    rows = [
        partition.rows(value, own.layout)
        for value, own in zip(inputs[half:], found, strict=True)
    ]
    given = [row for row in rows if row is not None]
    if len(given) < half or ranks != {1}:
        return None
    layout, shape = found[0].target, inputs[half].shape
    if shape is None:
        return None
    shape = (layout.size, *shape[1:])
    (local,) = partition.builder.copy(
        node.operation,
        [*(own.own for own in found), *given],
        [local_shape(static(shape), layout)],
    )
    return [Value(layout, local, shape=shape)]


def _are_all(found: Sequence[Places]) -> bool:
    """Whether places are the parts of all rows, each of which is there once."""
    first = found[0].own.operation
    if first is None or first.type != "DynamicPartition":
        return False
    if len(first.outputs) != len(found):
        return False
    if any(o.own is not t for o, t in zip(found, first.outputs, strict=True)):
        return False
    whole = source(first.inputs[0]).operation
    if whole is None or whole.type != "Range":
        return False
    return found[0].grain == 1


# ---- tensors of a tower ------------------------------------------------------


def first_size(partition: Partitioner, tensor: Tensor) -> Tensor:
    """Return how many rows a tower's tensor has."""
    build = partition.builder
    shape = build.op("Shape", [tensor], is_repeated=True, out_type=SIZE)
    return partition.entry(shape, 0)


def static_rows(sizes: Sequence[Any]) -> Any:
    """Return the shape of some rows, as far as TensorFlow knows it."""
    return static((None, *sizes))


def source(tensor: Tensor) -> Tensor:
    """Return what has the same entries in the same order."""
    moving = ("Reshape", "Identity", "ExpandDims", "Squeeze")
    while tensor.operation is not None and tensor.operation.type in moving:
        tensor = tensor.operation.inputs[0]
    return tensor
