"""Means over rows: of all rows, or of each tower's own; and their variances.

What a step takes from a mean for its variance, ``Mean((x - Mean(x))^2)``, would
wait for the mean of all. Each tower has its own mean and the mean of the
squares of the distances from that; those of all follow from them (Chan, Golub
and LeVeque, 1983) as exactly as on one device: nothing large is subtracted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Value,
    Values,
    require,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, rule
from keras_towers.partition.rules.reductions import axes_of

_COPIES = ("Identity", "StopGradient", "Snapshot")


@rule("Mean")
def _mean(node: Node, value: Value, over: Value) -> Values:
    """A mean of rows; no rows have none."""
    partition = node.partition
    gone, (layout, rows) = axes_of(over, value.rank), value.as_rows()
    require(layout.axis in gone and node.dtype(0).is_floating)
    found = partition.variances.pop(node.operation.name, None)
    if found is not None:
        return [found]
    along = partition.constant(gone, node.dtype(1))
    behind = _variance_behind(node.operation) if partition.meets else None
    if behind is not None:
        mean, partition.variances[behind.name] = _moments(
            partition, node.operation, behind, value, along
        )
        return [mean]
    # A sum might be too large for its dtype.
    (mean_of_tower,) = node.copy([rows, along])
    fraction = partition.fraction(layout.unit, rows.dtype)
    part = partition.op("MulNoNan", [mean_of_tower, fraction], node.shapes[0])
    return [Value(PARTIAL, part)]


def _variance_behind(mean: Any) -> Any:
    """Return the operation that computes the variance of a mean, or None."""
    if not mean.get_attr("keep_dims") or not mean.outputs[0].dtype.is_floating:
        return None
    entries, over = mean.inputs
    for squares in _squares_behind(mean.outputs[0], entries):
        for operation in squares.consumers():
            is_mean = (
                operation.type == "Mean" and operation.inputs[0] is squares
            )
            if is_mean and _same_axes(operation.inputs[1], over):
                return operation
    return None


def _squares_behind(mean: Any, entries: Any) -> Iterator[Any]:
    """The squares of the distances of entries from their mean."""
    waiting = [mean]
    while waiting:
        tensor = waiting.pop()
        for operation in tensor.consumers():
            if operation.type in _COPIES:
                waiting += operation.outputs
            elif {*map(id, operation.inputs)} != {id(tensor), id(entries)}:
                continue
            elif operation.type == "SquaredDifference":
                yield operation.outputs[0]
            elif operation.type == "Sub":
                for square in operation.outputs[0].consumers():
                    if square.type == "Square":
                        yield square.outputs[0]


def _same_axes(one: Any, other: Any) -> bool:
    if one is other:
        return True
    values = [tf.get_static_value(t) for t in (one, other)]
    if any(value is None for value in values):
        return False
    return sorted(values[0].ravel()) == sorted(values[1].ravel())


def _moments(
    partition: Partitioner,
    mean: Any,
    variance: Any,
    value: Value,
    along: Tensor,
) -> tuple[Value, Value]:
    """Return a mean and a variance of rows.

    Args:
        partition: lays out the trace.
        mean: the operation of the mean.
        variance: that of the variance.
        value: of what they are.
        along: the axes that they reduce.
    """
    (layout, rows) = value.as_rows()
    keeps = {"keep_dims": True}
    (own_mean,) = partition.copy(mean, [rows, along])
    squares = partition.op("SquaredDifference", [rows, own_mean], rows.shape)
    (own_variance,) = partition.copy(
        variance, [squares, along], [own_mean.shape], keeps
    )
    means, variances = (
        partition.exchange("gather", tensor, layout.axis)
        for tensor in (own_mean, own_variance)
    )
    fraction = partition.fraction(layout.unit, rows.dtype)
    ones = [1] * value.rank
    fraction = partition.op("Reshape", [fraction, ones], ones)
    fractions = partition.exchange("gather", fraction, layout.axis)

    def combined(tensors: Tensor, like: Any) -> Tensor:
        # No rows have no mean.
        weighted = partition.op("MulNoNan", [tensors, fractions], tensors.shape)
        return partition.op(
            "Sum",
            [weighted, along],
            like.outputs[0].shape,
            keep_dims=like.get_attr("keep_dims"),
        )

    whole = combined(means, mean)
    apart = partition.op("SquaredDifference", [means, whole], means.shape)
    variances = partition.op("AddV2", [variances, apart], means.shape)
    return (
        Value(REPLICATED, whole=whole),
        Value(REPLICATED, whole=combined(variances, variance)),
    )


# ---- of each tower's own rows ------------------------------------------------

# The graphs of the functions that are called here: nobody else calls them.
_MEANS: weakref.WeakSet[Any] = weakref.WeakSet()


@tf.custom_gradient
def own_mean(x: tf.Tensor) -> Any:
    """Return for each row the mean of all that the same tower has.

    On one device it is the mean of all rows. It is its own gradient, as the
    operator is linear and self-adjoint.

    Args:
        x: the rows, along the first axis.
    """
    return _mean_of_rows(x), own_mean


@tf.function(autograph=False)
def _mean_of_rows(x: tf.Tensor) -> tf.Tensor:
    _MEANS.add(compat.get_default_graph())
    return tf.broadcast_to(tf.reduce_mean(x, 0, keepdims=True), tf.shape(x))


def lay_out_own_mean(
    partition: Partitioner, graph: Any, inputs: Values
) -> Value | None:
    """Lay out a call of ``own_mean`` of rows; None: it is no such call."""
    if graph not in _MEANS:
        return None
    (x,) = inputs
    layout, rows = x.sharded, x.local
    if layout is None or rows is None or layout.axis or layout.blocks > 1:
        return None
    mean = partition.op("Mean", [rows, [0]], keep_dims=True)
    shape = partition.shape(rows)
    # Where there are no rows, none of them has the mean of nothing.
    means = partition.op("BroadcastTo", [mean, shape], rows.shape)
    return Value(layout, means, shape=x.shape)
