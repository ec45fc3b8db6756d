"""Entries that are picked by their places, and put there."""

from __future__ import annotations

import tensorflow as tf

from keras_towers.partition.builder import attribute
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner, local_shape
from keras_towers.partition.registry import axes, rule
from keras_towers.partition.rules.reductions import numbers


@axes("GatherV2")
def _picked(
    node: Node, values: Value, places: Value, along: Value
) -> Factors | None:
    ranks, found = (node.rank(0), node.rank(1)), numbers(along)
    if None in ranks or found is None:
        return None
    rank, count = ranks[0] or 0, ranks[1] or 0
    axis, batch = found[0] % rank, node.attr("batch_dims")
    batch = batch % count if batch < 0 else batch
    own = [f"v{a}" for a in range(rank)]
    picked = [f"p{a}" for a in range(count)]
    # Along these axes both have the same rows.
    picked[:batch] = own[:batch]
    output = [*own[:axis], *picked[batch:], *own[axis + 1 :]]
    labels = [None if a == axis else own[a] for a in range(rank)]
    return Factors([labels, picked, None], [output], linear=(frozenset({0}),))


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
    if layout is None or node.attr("batch_dims"):
        return None
    # The variable is read once, for all towers.
    variable = partition.whole(handle)
    least = partition.after(node, [variable], True)
    dtype = node.output_dtype(0)
    (table,) = build.add(
        "ReadVariableOp",
        [variable],
        {"dtype": attribute(dtype)},
        [(dtype, tf.TensorShape(None))],
        least=least,
    )
    partition.note_use(node, [variable], True, least)
    assert places.local is not None
    zero = build.constant(0, places.local.dtype)
    local = build.op(
        "GatherV2",
        [table, places.local, zero],
        local_shape(node.shapes[0], layout),
        batch_dims=0,
    )
    rank = node.rank(1)
    shape = None
    if places.shape is not None and node.shapes[0].rank is not None:
        behind = list(node.shapes[0])[rank:]
        shape = (*places.shape, *behind)
    return [Value(layout, local, shape=shape)]
