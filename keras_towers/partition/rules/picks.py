"""Rows that are picked, in the order of their numbers."""

from __future__ import annotations

from keras_towers.partition.builder import UNKNOWN_SHAPE, attribute
from keras_towers.partition.conversions import local_shape
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Below, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import axes, rule
from keras_towers.partition.rules.ragged import repeated
from keras_towers.partition.rules.reductions import numbers


def _axes(
    node: Node, values: Value, places: Value, along: Value
) -> tuple[int, int] | None:
    """The axis from which is picked, and before how many both are alike."""
    found, rank, count = numbers(along), node.rank(0), node.rank(1)
    if found is None or rank is None or count is None:
        return None
    batch = node.attr("batch_dims")
    return found[0] % rank, batch % count if batch < 0 else batch


@axes("GatherV2")
def _picked_axes(
    node: Node, values: Value, places: Value, along: Value
) -> Factors | None:
    found = _axes(node, values, places, along)
    if found is None:
        return None
    axis, batch = found
    own = [f"v{a}" for a in range(node.rank(0) or 0)]
    picked = [f"p{a}" for a in range(node.rank(1) or 0)]
    # Along these axes both have the same rows.
    picked[:batch] = own[:batch]
    output = [*own[:axis], *picked[batch:], *own[axis + 1 :]]
    labels = [*own[:axis], None, *own[axis + 1 :]]
    return Factors([labels, picked, None], [output], linear=(frozenset({0}),))


@rule("GatherV2", always=True)
def _picked(
    partition: Partitioner,
    node: Node,
    values: Value,
    places: Value,
    axis_: Value,
) -> list[Value] | None:
    """By their numbers, or by indices along an axis that is not divided."""
    inputs = [values, places, axis_]
    repeats, factors = repeated(partition, node), _picked_axes(node, *inputs)
    found, own = _axes(node, *inputs), places.places
    if repeats is not None or found is None or factors is None:
        return None if repeats is None else [repeats]
    axis, batch = found
    size = None if values.shape is None else values.shape[axis]
    if axis == batch > 0 and places.numbers is None and isinstance(size, int):
        # They are inside, as they pick.
        places.numbers = Below(size)
    if own is None or own.is_first_column or batch or values.local is None:
        return partition.divided(node, inputs, factors)
    if values.sharded != own.target.along(axis):
        return partition.divided(node, inputs, factors)
    given = [values.local, own.own, partition.local(axis_)]
    layout = own.layout.along(axis + own.layout.axis)
    return partition.computed_by_towers(node, given, layout)


@axes("GatherNd")
def _picked_at(node: Node, values: Value, places: Value) -> Factors | None:
    rank, count = node.rank(0), node.rank(1)
    depth = places.shape[-1] if places.shape else None
    if rank is None or count is None or not isinstance(depth, int):
        return None
    picked = [f"p{a}" for a in range(count - 1)]
    behind = [f"v{a}" for a in range(depth, rank)]
    labels = [*[None] * depth, *behind]
    return Factors(
        [labels, [*picked, None]],
        [[*picked, *behind]],
        linear=(frozenset({0}),),
        needs_rows=True,
    )


@rule("ResourceGather")
def _looked_up(
    partition: Partitioner, node: Node, handle: Value, places: Value
) -> list[Value] | None:
    layout, build = places.sharded, partition.builder
    if layout is None or places.local is None or node.attr("batch_dims"):
        return None
    # The variable is read once, for all towers, or each reads its own copy.
    variable = partition.local(handle)
    least = partition.order.after(node, [variable], True)
    dtype = node.output_dtype(0)
    (table,) = build.add(
        "ReadVariableOp",
        [variable],
        {"dtype": attribute(dtype)},
        [(dtype, UNKNOWN_SHAPE)],
        least=least,
    )
    partition.order.note_use(node, [variable], True, least)
    local = build.op(
        "GatherV2",
        [table, places.local, build.constant(0, places.local.dtype)],
        local_shape(node.shapes[0], layout),
        batch_dims=0,
    )
    shape = None
    if places.shape is not None and node.shapes[0].rank is not None:
        shape = (*places.shape, *node.shapes[0][len(places.shape) :])
    return [Value(layout, local, shape=shape)]
