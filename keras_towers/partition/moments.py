"""Means and the variances behind them, in one exchange.

What a step takes from a mean for its variance, ``Mean((x - Mean(x))^2)``, would
wait for the mean of all. Each tower has its own mean and the mean of the
squares of the distances from that; those of all follow from them (Chan, Golub
and LeVeque, 1983) as exactly as on one device: nothing large is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers.partition.builder import AttrValue
from keras_towers.partition.layouts import REPLICATED, Sharded, Value
from keras_towers.partition.program import Tensor

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner

_SAME = ("Identity", "StopGradient", "Snapshot")


def variance_behind(mean: Any) -> Any:
    """Return the operation that computes the variance of a mean, or None."""
    if not mean.get_attr("keep_dims") or not mean.outputs[0].dtype.is_floating:
        return None
    given, over = mean.inputs
    for squares in _squares_behind(mean.outputs[0], given):
        for found in squares.consumers():
            is_mean = found.type == "Mean" and found.inputs[0] is squares
            if is_mean and _same_axes(found.inputs[1], over):
                return found
    return None


def _squares_behind(mean: Any, given: Any) -> Iterator[Any]:
    """The squares of the distances of entries from their mean."""
    waiting = [mean]
    while waiting:
        tensor = waiting.pop()
        for operation in tensor.consumers():
            if operation.type in _SAME:
                waiting += operation.outputs
            elif not _is_distance(operation, tensor, given):
                continue
            elif operation.type == "SquaredDifference":
                yield operation.outputs[0]
            elif operation.type == "Sub":
                for square in operation.outputs[0].consumers():
                    if square.type == "Square":
                        yield square.outputs[0]


def _is_distance(operation: Any, mean: Any, given: Any) -> bool:
    both = list(operation.inputs)
    if len(both) != 2:
        return False
    return (both[0] is given and both[1] is mean) or (
        both[0] is mean and both[1] is given
    )


def _same_axes(one: Any, other: Any) -> bool:
    if one is other:
        return True
    values = [tf.get_static_value(t) for t in (one, other)]
    if any(value is None for value in values):
        return False
    return sorted(values[0].ravel()) == sorted(values[1].ravel())


def moments(
    partition: Partitioner,
    mean: Any,
    variance: Any,
    value: Value,
    layout: Sharded,
    along: Tensor,
) -> tuple[Value, Value]:
    """Return a mean and a variance of rows.

    Args:
        partition: lays out the trace.
        mean: the operation of the mean.
        variance: that of the variance.
        value: of what they are.
        layout: where its rows are.
        along: the axes that they reduce.
    """
    build, own = partition.builder, value.local
    assert own is not None
    keeps = {"keep_dims": AttrValue(b=True)}
    (own_mean,) = build.copy(mean, [own, along])
    squares = build.op("SquaredDifference", [own, own_mean], own.shape)
    (own_variance,) = build.copy(
        variance, [squares, along], [own_mean.shape], keeps
    )
    means, variances = (
        build.exchange("gather", tensor, layout.axis)
        for tensor in (own_mean, own_variance)
    )
    shares = partition.shares(layout, own.dtype, own.shape.rank or 0)

    def combined(tensors: Tensor, like: Any) -> Tensor:
        # No rows have no mean.
        given = build.op("MulNoNan", [tensors, shares], tensors.shape)
        return build.op(
            "Sum",
            [given, along],
            like.outputs[0].shape,
            keep_dims=like.get_attr("keep_dims"),
        )

    whole = combined(means, mean)
    apart = build.op("SquaredDifference", [means, whole], means.shape)
    every = build.op("AddV2", [variances, apart], means.shape)
    return (
        Value(REPLICATED, whole=whole),
        Value(REPLICATED, whole=combined(every, variance)),
    )
