"""Sums, means and extremes along axes, and cumulative operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.division import Factors, NewAxis, along_axes
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Shape,
    Value,
    Values,
    known_axes,
    require,
    static,
)
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, axes, rule, shape_of

_EXTREMES = ("Max", "Min", "Prod", "All", "Any")
_COPIES = ("Identity", "StopGradient", "Snapshot")


@axes("Sum", "Mean", *_EXTREMES, "EuclideanNorm")
def _reduction(node: Node, value: Value, over: Value) -> Factors:
    reduced = known_axes(over, value.rank)
    keeps = node.attr("keep_dims")
    # A mean of integers is rounded.
    is_linear = node.type == "Sum" or (
        node.type == "Mean" and not node.dtype(0).is_integer
    )
    left = [
        NewAxis(1) if axis in reduced else axis
        for axis in range(value.rank)
        if keeps or axis not in reduced
    ]
    return Factors(
        [range(value.rank), None],
        [left],
        linear=[[0]] if is_linear else (),
        summed=reduced if node.type == "Sum" else (),
        # Axes that the trace computes from shapes may include axes of size 1.
        entries={1: reduced},
    )


@rule(*_EXTREMES)
def _reduce_extreme(node: Node, value: Value, over: Value) -> Values:
    """Reduce on each tower, then reduce the towers' results."""
    partitioner = node.partitioner
    reduced = known_axes(over, value.rank)
    layout, rows = value.as_rows()
    require(layout.axis in reduced)
    along = partitioner.constant(reduced, node.dtype(1))
    kept: Sequence[Any] = value.sizes
    if node.attr("keep_dims"):
        kept = [1 if k in reduced else size for k, size in enumerate(kept)]
    else:
        kept = [size for k, size in enumerate(kept) if k not in reduced]
    # The traced shape may be unknown.
    (own,) = node.copy([rows, along], [static(kept)])
    return [partitioner.reduce_over_towers(node.type, own, kept)]


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
    return Factors([range(value.rank)], [[at]], linear=[[0]], summed=summed)


def _channels(node: Node, value: Value) -> int:
    """The axis of the bias."""
    return 1 if node.attr("data_format") == b"NCHW" else value.rank - 1


# ---- means and variances of rows ---------------------------------------------

# The variance ``Mean((x - Mean(x))^2)`` would have to wait for the exchange of
# the mean. Instead, every tower computes the mean and variance of its rows, and
# both are combined in a single exchange (Chan, Golub and LeVeque, 1983). This
# is as accurate as on one device, as no large numbers are subtracted. So the
# statistics of BatchNormalization, which are such means and variances, are
# those of the global batch.


@rule("Mean")
def _mean(node: Node, value: Value, over: Value) -> Values:
    """Compute a mean over rows; a tower without rows adds 0 to it."""
    partitioner = node.partitioner
    reduced, (layout, rows) = known_axes(over, value.rank), value.as_rows()
    require(layout.axis in reduced and node.dtype(0).is_floating)
    variance = _find_variance(node.operation)
    if variance is not None and partitioner.can_exchange:
        mean, of_variance = _add_moments(
            partitioner, node.operation, variance, value, reduced
        )
        # The partitioner skips operations that have a value.
        partitioner.values[variance.outputs[0].name] = of_variance
        return [mean]
    # The sum might overflow, so the local means are weighted.
    along = partitioner.constant(reduced, node.dtype(1))
    (mean_of_tower,) = node.copy([rows, along])
    fraction = partitioner.unit_fraction(layout.unit, rows.dtype)
    part = partitioner.op("MulNoNan", [mean_of_tower, fraction], node.shapes[0])
    return [Value(PARTIAL, part)]


def _find_variance(mean: Any) -> Any:
    """Return the operation that computes the variance of a mean, or None."""
    if not mean.get_attr("keep_dims") or not mean.outputs[0].dtype.is_floating:
        return None
    entries, over = mean.inputs
    for squares in _find_squares(mean.outputs[0], entries):
        for operation in squares.consumers():
            is_mean = (
                operation.type == "Mean" and operation.inputs[0] is squares
            )
            if is_mean and _same_axes(operation.inputs[1], over):
                return operation
    return None


def _find_squares(mean: Any, entries: Any) -> Iterator[Any]:
    """Yield squared distances of entries from their mean."""
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


def _add_moments(
    partitioner: Partitioner,
    mean: Any,
    variance: Any,
    value: Value,
    reduced: Sequence[int],
) -> tuple[Value, Value]:
    """Compute a mean and a variance of rows; return their values.

    Args:
        partitioner: the partitioner of the program.
        mean: the traced operation of the mean.
        variance: the traced operation of the variance.
        value: the rows.
        reduced: the axes that both reduce.
    """
    layout, rows = value.as_rows()
    along = partitioner.constant(reduced, mean.inputs[1].dtype)
    keeps = {"keep_dims": True}
    (own_mean,) = partitioner.copy(mean, [rows, along])
    squares = partitioner.op("SquaredDifference", [rows, own_mean], rows.shape)
    (own_variance,) = partitioner.copy(
        variance, [squares, along], [own_mean.shape], keeps
    )
    means, variances = (
        partitioner.exchange("gather", tensor, layout.axis)
        for tensor in (own_mean, own_variance)
    )
    fraction = partitioner.unit_fraction(layout.unit, rows.dtype)
    ones = [1] * value.rank
    fraction = partitioner.op("Reshape", [fraction, ones], ones)
    fractions = partitioner.exchange("gather", fraction, layout.axis)

    def combine(tensors: Tensor, like: Any) -> Value:
        # The mean of no rows is NaN.
        weighted = partitioner.op("MulNoNan", [tensors, fractions], means.shape)
        keeps, shape = like.get_attr("keep_dims"), like.outputs[0].shape
        operands = [weighted, along]
        whole = partitioner.op("Sum", operands, shape, keep_dims=keeps)
        sizes = [1 if a in reduced else s for a, s in enumerate(value.sizes)]
        left = [s for a, s in enumerate(sizes) if keeps or a not in reduced]
        return Value(REPLICATED, whole=whole, shape=tuple(left))

    of_mean = combine(means, mean)
    deviations = partitioner.op(
        "SquaredDifference", [means, of_mean.whole], means.shape
    )
    variances = partitioner.op("AddV2", [variances, deviations], means.shape)
    return of_mean, combine(variances, variance)
