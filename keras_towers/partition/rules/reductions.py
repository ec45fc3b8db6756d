"""Sums, means and extremes along axes, and what runs along one axis."""

from __future__ import annotations

import numpy as np

from keras_towers.partition.factors import ONE, Factors, along
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Shape,
    Value,
    Values,
    require,
    static,
)
from keras_towers.partition.registry import Node, axes, rule, shape_of
from keras_towers.partition.sizes import UNKNOWN, Size

_LINEAR = ("Sum", "Mean")
_EXTREMES = ("Max", "Min", "Prod", "All", "Any")


def numbers(value: Value) -> list[int]:
    """Return the entries of a vector or a number.

    Raises:
        NotDivided: if they are not known.
    """
    require(value.known is not None)
    entries = list(np.ravel(value.known))
    require(not any(isinstance(e, Size) or e is UNKNOWN for e in entries))
    return [int(entry) for entry in entries]


def axes_of(value: Value, rank: int) -> list[int]:
    """Return the axes that a value names, each 0 or more.

    Raises:
        NotDivided: if they are not known, or there are none.
    """
    require(rank)
    return sorted({axis % rank for axis in numbers(value)})


@axes(*_LINEAR, *_EXTREMES, "EuclideanNorm")
def _reduced_axes(node: Node, value: Value, over: Value) -> Factors:
    gone = axes_of(over, value.rank)
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
def _extreme(node: Node, value: Value, over: Value) -> Values:
    """That of each tower first, then that of these."""
    partition = node.partition
    gone = axes_of(over, value.rank)
    layout, rows = value.as_rows()
    require(layout.axis in gone and partition.meets)
    along = partition.constant(gone, node.dtype(1))
    sizes = enumerate(value.sizes)
    shape = static([1 if axis in gone else size for axis, size in sizes])
    (extreme,) = node.copy([rows, along], [shape], {"keep_dims": True})
    extremes = partition.exchange("gather", extreme, layout.axis)
    (whole,) = node.copy([extremes, along])
    return [Value(REPLICATED, whole=whole)]


@axes("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulated(node: Node, value: Value, over: Value) -> Factors:
    linear = [[0]] if node.type == "Cumsum" else ()
    return along(axes_of(over, value.rank), [value, over], 1, linear)


@axes("ArgMax", "ArgMin")
def _place_of_extreme(node: Node, value: Value, over: Value) -> Factors:
    return along(axes_of(over, value.rank), [value, over], keeps=False)


@shape_of("TopKV2")
def _shape_of_top_k(node: Node, value: Value, count: Value) -> Shape:
    return (*value.sizes[:-1], count.number)


@axes("L2Loss")
def _half_of_squares(node: Node, value: Value) -> Factors:
    labels = range(value.rank)
    return Factors([labels], [()], summed=labels)


@rule("BiasAddGrad")
def _bias_gradient_of_images(node: Node, value: Value) -> Values:
    """The same sum, which oneDNN does not fuse with the kernel's gradient.

    What it fuses them to has no second output where there are no images.
    """
    layout, rows = value.as_rows()
    at = _channels(node, value)
    require(value.rank > 2 and layout.axis != at)
    gone = [axis for axis in range(value.rank) if axis != at]
    total = node.partition.op("Sum", [rows, gone], node.shapes[0])
    return [Value(PARTIAL, local=total, shape=(value.sizes[at],))]


@axes("BiasAddGrad")
def _bias_gradient(node: Node, value: Value) -> Factors:
    at = _channels(node, value)
    summed = set(range(value.rank)) - {at}
    return Factors([range(value.rank)], [[at]], [[0]], summed)


def _channels(node: Node, value: Value) -> int:
    """The axis that the bias has."""
    return 1 if node.attr("data_format") == b"NCHW" else value.rank - 1
