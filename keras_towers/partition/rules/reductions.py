"""Sums, means and extremes along axes, and what runs along one axis."""

from __future__ import annotations

import numpy as np

from keras_towers.partition.builder import AttrValue
from keras_towers.partition.conversions import static
from keras_towers.partition.factors import ONE, Factors, along
from keras_towers.partition.layouts import REPLICATED, Shape, Value
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import Node, axes, rule, shape_of
from keras_towers.partition.sizes import UNKNOWN, Size

_LINEAR = ("Sum", "Mean")
_EXTREMES = ("Max", "Min", "Prod", "All", "Any")


def numbers(value: Value) -> list[int] | None:
    """Return the entries of a vector or a number, if all are known."""
    if value.known is None:
        return None
    entries = list(np.ravel(value.known))
    if any(isinstance(e, Size) or e is UNKNOWN for e in entries):
        return None
    return [int(entry) for entry in entries]


def axes_of(value: Value, rank: int) -> list[int] | None:
    """Return the axes that a value names, each 0 or more."""
    entries = numbers(value)
    if entries is None or not rank:
        return None
    return sorted({axis % rank for axis in entries})


@axes(*_LINEAR, *_EXTREMES, "EuclideanNorm")
def _reduced_axes(node: Node, value: Value, over: Value) -> Factors | None:
    gone = axes_of(over, value.rank)
    if gone is None:
        return None
    keeps = node.attr("keep_dims")
    left = [
        ONE if axis in gone else axis
        for axis in range(value.rank)
        if keeps or axis not in gone
    ]
    return Factors(
        [range(value.rank), None],
        [left],
        [[0]] if node.type in _LINEAR else (),
        gone if node.type == "Sum" else (),
        # What the trace computes from shapes may name other axes of size 1.
        entries={1: gone},
    )


@rule(*_EXTREMES)
def _extreme(
    partition: Partitioner, node: Node, value: Value, over: Value
) -> list[Value] | None:
    """That of each tower first, then that of these."""
    gone, layout, rows = axes_of(over, value.rank), value.sharded, value.local
    if gone is None or layout is None or rows is None:
        return None
    if layout.axis not in gone or not partition.builder.meets:
        return None
    build = partition.builder
    along = build.constant(gone, node.dtype(1))
    sizes = enumerate(value.shape or ())
    shape = static([1 if axis in gone else size for axis, size in sizes])
    (extreme,) = build.copy(
        node.operation, [rows, along], [shape], {"keep_dims": AttrValue(b=True)}
    )
    extremes = build.exchange("gather", extreme, layout.axis)
    (whole,) = build.copy(node.operation, [extremes, along])
    return [Value(REPLICATED, whole=whole)]


@axes("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulated(node: Node, value: Value, over: Value) -> Factors | None:
    gone = axes_of(over, value.rank)
    linear = [[0]] if node.type == "Cumsum" else ()
    return None if gone is None else along(gone, [value, over], 1, linear)


@axes("ArgMax", "ArgMin")
def _place_of_extreme(node: Node, value: Value, over: Value) -> Factors | None:
    gone = axes_of(over, value.rank)
    return None if gone is None else along(gone, [value, over], keeps=False)


@shape_of("TopKV2")
def _shape_of_top_k(node: Node, value: Value, count: Value) -> Shape | None:
    if value.shape is None or count.known is None:
        return None
    size = count.known.flat[0]
    return (*value.shape[:-1], None if size is UNKNOWN else size)


@axes("L2Loss")
def _half_of_squares(node: Node, value: Value) -> Factors:
    labels = range(value.rank)
    return Factors([labels], [()], summed=labels)


@axes("BiasAddGrad")
def _bias_gradient(node: Node, value: Value) -> Factors:
    is_first = node.attr("data_format") == b"NCHW"
    at = 1 if is_first else value.rank - 1
    summed = set(range(value.rank)) - {at}
    return Factors([range(value.rank)], [[at]], [[0]], summed)
