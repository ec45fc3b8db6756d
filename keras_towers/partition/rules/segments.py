"""Rows that are summed, counted or compared by the segments they belong to."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import PARTIAL, REPLICATED, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import (
    Partitioner,
    local_shape,
    static,
)
from keras_towers.partition.registry import axes, by_places, rule
from keras_towers.partition.sizes import UNKNOWN

_OTHERS = {
    "UnsortedSegmentMax": "Max",
    "UnsortedSegmentMin": "Min",
    "UnsortedSegmentProd": "Prod",
}
_SEGMENTS = ("UnsortedSegmentSum", *_OTHERS)


def _sizes(values: Value, segments: Value, count: Value) -> Any:
    """The shape of what the segments have, as far as it is known."""
    if values.shape is None or segments.shape is None:
        return None
    number = None if count.known is None else count.known.flat[0]
    number = None if number is UNKNOWN else number
    return (number, *values.shape[len(segments.shape) :])


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


@rule(*_SEGMENTS)
def _segments(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    factors = _segment_axes(node, *inputs)
    sizes = _sizes(*inputs)
    if factors is None or sizes is None:
        return None
    found = partition.divided(node, list(inputs), factors)
    if found is None and node.type in _OTHERS:
        found = _of_all(partition, node, *inputs)
    for value in found or ():
        value.shape = sizes
    return found


def _of_all(
    partition: Partitioner,
    node: Node,
    values: Value,
    segments: Value,
    count: Value,
) -> list[Value] | None:
    """That of each tower first, then that of these.

    A segment that a tower has no rows of has what changes nothing.
    """
    layout, build = segments.sharded or values.sharded, partition.builder
    if layout is None or layout.axis >= len(segments.shape or ()):
        return None
    if not build.meets:
        return None
    rows = [partition.rows(value, layout) for value in (values, segments)]
    given = [row for row in rows if row is not None]
    if len(given) < len(rows):
        return None
    (own,) = build.copy(node.operation, [*given, partition.local(count)])
    zero, first = build.constant(0, tf.int32), build.constant([0], tf.int32)
    own = build.op("ExpandDims", [own, zero], [1, *_static(own)])
    every = build.exchange("gather", own)
    whole = build.op(
        _OTHERS[node.type], [every, first], node.shapes[0], keep_dims=False
    )
    return [Value(REPLICATED, whole=whole)]


def _static(tensor: Any) -> list[Any]:
    return tensor.shape.as_list()


@by_places(*_SEGMENTS)
def _own_segments(
    partition: Partitioner,
    node: Node,
    values: Value,
    segments: Value,
    count: Value,
) -> list[Value] | None:
    """What belongs to each tower's own rows."""
    found, sizes = segments.places, _sizes(values, segments, count)
    if found is None or found.is_first_column or sizes is None:
        return None
    layout, build = found.target, partition.builder
    if sizes[0] is None or sizes[0] != layout.size:
        return None
    rows = partition.rows(values, found.layout)
    if rows is None:
        return None
    number = partition.times(layout.rows, layout.unit.count)
    number = partition.cast(number, node.dtype(2))
    (local,) = build.copy(
        node.operation,
        [rows, found.own, number],
        [local_shape(static(sizes), layout)],
    )
    return [Value(layout, local, shape=sizes)]


@axes("ScatterNd")
def _scattered(
    node: Node, places: Value, rows: Value, target: Value
) -> Factors | None:
    rank, own = node.rank(0), node.rank(1)
    depth = places.shape[-1] if places.shape else None
    if rank is None or own is None or not isinstance(depth, int):
        return None
    picked = [f"p{a}" for a in range(rank - 1)]
    behind = [f"v{a}" for a in range(own - rank + 1)]
    output = [*[None] * depth, *behind]
    # The shape that is made is that of one device.
    labels = [*picked, *[None] * len(behind)]
    return Factors(
        [[*picked, None], labels, None],
        [output],
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
    layout = places.sharded or rows.sharded
    if layout is None or values.sharded is not None:
        return None
    if layout.axis >= len(places.shape or ()) - 1:
        return None
    own = [partition.rows(value, layout) for value in (places, rows)]
    given = [row for row in own if row is not None]
    if len(given) < len(own):
        return None
    part = partition.partial(values)
    (local,) = partition.builder.copy(node.operation, [part, *given])
    return [Value(PARTIAL, local, shape=values.shape)]


@axes("DenseBincount")
def _counted(
    node: Node, values: Value, size: Value, weights: Value
) -> Factors | None:
    rank, none = node.rank(0), weights.shape == (0,)
    if rank is None or weights.shape is None or node.attr("binary_output"):
        return None
    if rank == 2:
        labels: list[Any] = [0, None]
        own = [None] if none else labels
        return Factors([labels, None, own], [labels])
    own = [None] if none else [0]
    linear = () if none else (frozenset({2}),)
    return Factors([[0], None, own], [[None]], frozenset({0}), linear)


@axes("Bincount")
def _counted_all(
    node: Node, values: Value, size: Value, weights: Value
) -> Factors | None:
    rank = node.rank(0)
    if rank is None or weights.shape is None:
        return None
    labels = list(range(rank))
    none = weights.shape == (0,)
    own = [None] if none else labels
    linear = () if none else (frozenset({2}),)
    return Factors([labels, None, own], [[None]], frozenset(labels), linear)
