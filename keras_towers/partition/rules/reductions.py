"""Sums, means and extremes along axes, and cumulative operations."""

from __future__ import annotations

import numpy as np

from keras_towers.partition.factors import ONE, Factors, along_axes
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

_EXTREMES = ("Max", "Min", "Prod", "All", "Any")


def known_ints(value: Value) -> list[int]:
    """Return the entries of a vector or number as ints.

    Raises:
        NotDivided: an entry is unknown or symbolic.
    """
    require(value.known is not None)
    entries = list(np.ravel(value.known))
    require(not any(isinstance(e, Size) or e is UNKNOWN for e in entries))
    return [int(entry) for entry in entries]


def known_axes(value: Value, rank: int) -> list[int]:
    """Return the axes that a value names, sorted, and none negative.

    Raises:
        NotDivided: they are unknown, or the reduced value has no axes.
    """
    require(rank)
    return sorted({axis % rank for axis in known_ints(value)})


@axes("Sum", "Mean", *_EXTREMES, "EuclideanNorm")
def _reduction(node: Node, value: Value, over: Value) -> Factors:
    reduced = known_axes(over, value.rank)
    keeps = node.attr("keep_dims")
    # A mean of integers is rounded.
    is_linear = node.type == "Sum" or (
        node.type == "Mean" and not node.dtype(0).is_integer
    )
    left = [
        ONE if axis in reduced else axis
        for axis in range(value.rank)
        if keeps or axis not in reduced
    ]
    return Factors(
        [range(value.rank), None],
        [left],
        [[0]] if is_linear else (),
        reduced if node.type == "Sum" else (),
        # Axes that the trace computes from shapes may include axes of size 1.
        entries={1: reduced},
    )


@rule(*_EXTREMES)
def _reduce_extreme(node: Node, value: Value, over: Value) -> Values:
    """Reduce on each tower, then reduce the towers' results."""
    partitioner = node.partitioner
    reduced = known_axes(over, value.rank)
    layout, rows = value.as_rows()
    require(layout.axis in reduced and partitioner.can_exchange)
    along = partitioner.constant(reduced, node.dtype(1))
    sizes = enumerate(value.sizes)
    shape = static([1 if axis in reduced else size for axis, size in sizes])
    (extreme,) = node.copy([rows, along], [shape], {"keep_dims": True})
    extremes = partitioner.exchange("gather", extreme, layout.axis)
    (whole,) = node.copy([extremes, along])
    return [Value(REPLICATED, whole=whole)]


@axes("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulative(node: Node, value: Value, over: Value) -> Factors:
    linear = [[0]] if node.type == "Cumsum" else ()
    return along_axes(known_axes(over, value.rank), [value, over], 1, linear)


@axes("ArgMax", "ArgMin")
def _arg_extreme(node: Node, value: Value, over: Value) -> Factors:
    return along_axes(known_axes(over, value.rank), [value, over], keeps=False)


@shape_of("TopKV2")
def _top_k_shape(node: Node, value: Value, count: Value) -> Shape:
    return (*value.sizes[:-1], count.number)


@axes("L2Loss")
def _l2_loss(node: Node, value: Value) -> Factors:
    labels = range(value.rank)
    return Factors([labels], [()], summed=labels)


@rule("BiasAddGrad")
def _bias_gradient_of_images(node: Node, value: Value) -> Values:
    """Compute it as a sum, which oneDNN does not fuse into another kernel.

    The fused kernel leaves its second output unset if a tower has no images.
    """
    layout, rows = value.as_rows()
    at = _channels(node, value)
    require(value.rank > 2 and layout.axis != at)
    reduced = [axis for axis in range(value.rank) if axis != at]
    total = node.partitioner.op("Sum", [rows, reduced], node.shapes[0])
    return [Value(PARTIAL, local=total, shape=(value.sizes[at],))]


@axes("BiasAddGrad")
def _bias_gradient(node: Node, value: Value) -> Factors:
    at = _channels(node, value)
    summed = set(range(value.rank)) - {at}
    return Factors([range(value.rank)], [[at]], [[0]], summed)


def _channels(node: Node, value: Value) -> int:
    """The axis of the bias."""
    return 1 if node.attr("data_format") == b"NCHW" else value.rank - 1
