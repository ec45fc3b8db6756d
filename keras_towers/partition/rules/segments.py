"""Rows that are summed, counted or compared by the segments they belong to."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import REPLICATED, Shape, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import axes, rule, shape_of
from keras_towers.partition.sizes import UNKNOWN

_OTHERS = {
    "UnsortedSegmentMax": "Max",
    "UnsortedSegmentMin": "Min",
    "UnsortedSegmentProd": "Prod",
}
_SEGMENTS = ("UnsortedSegmentSum", *_OTHERS)


@shape_of(*_SEGMENTS)
def _sizes(
    node: Node, values: Value, segments: Value, count: Value
) -> Shape | None:
    """The shape of what the segments have, as far as it is known."""
    if values.shape is None or segments.shape is None:
        return None
    number = UNKNOWN if count.known is None else count.known.flat[0]
    return (
        None if number is UNKNOWN else number,
        *values.shape[len(segments.shape) :],
    )


@axes(*_SEGMENTS)
def _segment_axes(
    node: Node, values: Value, segments: Value, count: Value
) -> Factors | None:
    rank, own = node.rank(0), node.rank(1)
    if rank is None or own is None:
        return None
    labels = list(range(rank))
    is_sum = node.type == "UnsortedSegmentSum"
    return Factors(
        [labels, labels[:own], None],
        [[None, *labels[own:]]],
        frozenset(labels[:own]) if is_sum else frozenset(),
        linear=(frozenset({0}),) if is_sum else (),
    )


@rule(*_OTHERS)
def _extremes(
    partition: Partitioner,
    node: Node,
    values: Value,
    segments: Value,
    count: Value,
) -> list[Value] | None:
    """Reduce segments on each tower, then reduce the towers' results.

    Where a tower has no rows of a segment, it gives the neutral value.
    """
    factors = _segment_axes(node, values, segments, count)
    if factors is not None:
        found = partition.divided(node, [values, segments, count], factors)
        if found is not None:
            return found
    layout, build = segments.sharded or values.sharded, partition.builder
    if layout is None or layout.axis >= len(segments.shape or ()):
        return None
    rows = [partition.rows(value, layout) for value in (values, segments)]
    if not build.meets or rows[0] is None or rows[1] is None:
        return None
    given = [rows[0], rows[1], partition.local(count)]
    (own,) = build.copy(node.operation, given)
    if own.shape.rank is None:
        return None
    first, sizes = build.constant([0], tf.int32), own.shape.as_list()
    own = build.op("ExpandDims", [own, build.constant(0, "int32")], [1, *sizes])
    every = build.exchange("gather", own)
    kind, shape = _OTHERS[node.type], node.shapes[0]
    whole = build.op(kind, [every, first], shape, keep_dims=False)
    return [Value(REPLICATED, whole=whole)]


@axes("ScatterNd")
def _scattered(
    node: Node, places: Value, rows: Value, target: Value
) -> Factors | None:
    if not places.shape or rows.shape is None:
        return None
    depth, count = places.shape[-1], len(places.shape) - 1
    if not isinstance(depth, int):
        return None
    picked = [f"p{a}" for a in range(count)]
    behind = [f"v{a}" for a in range(len(rows.shape) - count)]
    # The shape that is made is that of one device.
    labels = [*picked, *[None] * len(behind)]
    return Factors(
        [[*picked, None], labels, None],
        [[*[None] * depth, *behind]],
        frozenset(picked),
        linear=(frozenset({1}),),
    )


@rule("TensorScatterAdd", "TensorScatterSub")
def _added_to(
    partition: Partitioner,
    node: Node,
    values: Value,
    places: Value,
    rows: Value,
) -> list[Value] | None:
    """Towers add their own rows to their parts of what is there."""
    found = _scattered(node, places, rows, values)
    if found is None or values.sharded is not None:
        return None
    factors = Factors(
        [None, *found.inputs[:2]],
        found.outputs,
        found.summed,
        given={0: partition.partial(values)},
    )
    return partition.divided(node, [values, places, rows], factors)


@axes("Bincount", "DenseBincount")
def _counted(
    node: Node, values: Value, size: Value, weights: Value
) -> Factors | None:
    rank, is_weighted = node.rank(0), weights.shape != (0,)
    if rank is None or weights.shape is None:
        return None
    # Of a matrix the rows are counted, each for itself.
    is_matrix = node.type == "DenseBincount" and rank == 2
    labels: list[Any] = [0, None] if is_matrix else list(range(rank))
    given = [labels, None, labels if is_weighted else [None]]
    if is_matrix:
        return Factors(given, [labels])
    # What only says if there is any cannot be added up.
    if node.type == "DenseBincount" and node.attr("binary_output"):
        return None
    linear = (frozenset({2}),) if is_weighted else ()
    return Factors(given, [[None]], frozenset(labels), linear)
