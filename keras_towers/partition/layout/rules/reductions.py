"""Sums, means and extremes along axes, and cumulative operations."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_towers.partition.ir.builder import static
from keras_towers.partition.ir.layouts import PARTIAL, REPLICATED
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import NUMBERS, asserted, require
from keras_towers.partition.ir.registry import (
    Factors,
    NewAxis,
    along_axes,
    operation,
)
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension
from keras_towers.partition.ir.values import Value, Values, known_axes
from keras_towers.partition.layout import folding
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules import row_numbers, row_splits
from keras_towers.partition.layout.units import Units

_COPIES = ("Identity", "StopGradient", "Snapshot")


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
        [range(value.rank)],
        [left],
        linear=[[0]] if is_linear else (),
        summed=reduced if node.type == "Sum" else (),
        # Axes that the trace computes from shapes may include axes of size 1.
        entries={1: reduced},
    )


def _gradient_of_broadcast(node: Node, value: Value, over: Value) -> Values:
    """Sum over axes that are known only when the step runs.

    The gradient of a broadcast is a sum over the axes that were broadcast,
    reshaped to the shape before. The rows' axis is not among them, unless it
    has a single row.
    """
    require(over.known is None)
    builder = node.builder
    layout, rows = value.as_rows()
    sizes, other = _broadcast_sizes(node)
    require(value.rank == len(sizes) == len(other))
    require(layout.size == sizes[layout.axis] == other[layout.axis])
    consumers = node.operation.outputs[0].consumers()
    require(all(consumer.type == "Reshape" for consumer in consumers))
    axes_of_rows = builder.constant([layout.axis], node.dtype(1))
    left, _ = builder.add(
        "ListDiff",
        [node.converter.replicate(over), axes_of_rows],
        {"T": node.dtype(1), "out_idx": tf.int32},
        [
            (dtype, tf.TensorShape([None]))
            for dtype in (node.dtype(1), tf.int32)
        ],
    )
    shape: list[Dimension] = [UNKNOWN] * value.rank
    shape[layout.axis] = layout.size
    return node.run_on_towers(
        [rows, left], layout, shapes=[shape], attributes={"keep_dims": True}
    )


def _broadcast_sizes(node: Node) -> tuple[list[Dimension], list[Dimension]]:
    """Return the two shapes whose broadcast determines the axes of a sum.

    The first one is that of the operand.

    Raises:
        NotDivided: its axes come from somewhere else.
    """
    axes_of = node.operation.inputs[1]
    require(axes_of.op.type == "BroadcastGradientArgs", NUMBERS)
    index = axes_of.value_index
    values = [node.scope.values[tensor.name] for tensor in axes_of.op.inputs]
    own, other = values[index], values[1 - index]
    return own.entries, other.entries


def _reduce_extreme(node: Node, value: Value, over: Value) -> Values:
    """Reduce on each tower, then reduce the towers' results."""
    reduced = known_axes(over, value.rank)
    layout, rows = value.as_rows()
    require(layout.axis in reduced)
    along = node.builder.constant(reduced, node.dtype(1))
    kept: Sequence[Dimension] = value.sizes
    if node.attr("keep_dims"):
        kept = [1 if k in reduced else size for k, size in enumerate(kept)]
    else:
        kept = [size for k, size in enumerate(kept) if k not in reduced]
    # The traced shape may be unknown.
    (own,) = node.copy([rows, along], [static(kept)])
    return [node.converter.reduce_over_towers(node.type, own, kept)]


def _sum_of_earlier_rows(node: Node, value: Value, over: Value) -> Values:
    """Compute a cumulative sum: each tower adds the sums of earlier towers."""
    builder, (layout, rows) = node.builder, value.as_rows()
    require(known_axes(over, value.rank) == [layout.axis])
    require(layout.blocks == 1 and not node.attr("reverse"))
    along = builder.constant(layout.axis, node.dtype(1))
    (own,) = node.copy([rows, along], [rows.shape])
    total = builder.op("Sum", [rows, [layout.axis]], keep_dims=True)
    before = builder.exchange("before", total)
    local = builder.op("AddV2", [own, before], own.shape)
    return [Value(layout, local, shape=value.sizes)]


def _cumulative(node: Node, value: Value, over: Value) -> Factors:
    linear = [[0]] if node.type == "Cumsum" else ()
    return along_axes(known_axes(over, value.rank), [value, over], 1, linear)


def _arg_extreme(node: Node, value: Value, over: Value) -> Factors:
    return along_axes(known_axes(over, value.rank), [value, over], keeps=False)


def _l2_loss(node: Node, value: Value) -> Factors:
    labels = range(value.rank)
    return Factors([labels], [()], summed=labels)


def _bias_gradient_of_images(node: Node, value: Value) -> Values:
    """Compute the gradient of a bias as a sum over images.

    oneDNN would fuse the original operation into another kernel, which leaves
    this output unset if a tower has no images.
    """
    layout, rows = value.as_rows()
    channels = _channels(node, value)
    require(value.rank > 2 and layout.axis != channels)
    reduced = [axis for axis in range(value.rank) if axis != channels]
    total = node.builder.op("Sum", [rows, reduced], node.shapes[0])
    return [Value(PARTIAL, local=total, shape=(value.sizes[channels],))]


def _bias_gradient(node: Node, value: Value) -> Factors:
    channels = _channels(node, value)
    summed = set(range(value.rank)) - {channels}
    return Factors(
        [range(value.rank)], [[channels]], linear=[[0]], summed=summed
    )


def _channels(node: Node, value: Value) -> int:
    """Return the axis of the bias."""
    return 1 if node.attr("data_format") == b"NCHW" else value.rank - 1


# ---- means and variances of rows ---------------------------------------------

# The variance ``Mean((x - Mean(x))^2)`` would have to wait for the exchange of
# the mean. Instead, every tower computes the mean and variance of its rows, and
# both are combined in a single exchange (Chan, Golub and LeVeque, 1983). This
# is as accurate as on one device, as no large numbers are subtracted. So the
# statistics of BatchNormalization, which are such means and variances, are
# those of the global batch.


def _mean_of_rows(node: Node, value: Value, over: Value) -> Values:
    """Compute a mean over rows; a tower without rows contributes 0."""
    builder, units, mean = node.builder, node.units, node.operation
    known = node.scope.variances.pop(mean, None)
    if known is not None:
        return [known]
    reduced, (layout, rows) = known_axes(over, value.rank), value.as_rows()
    require(layout.axis in reduced and node.dtype(0).is_floating)
    variance = _variance_of(mean) if builder.can_exchange else None
    if variance is not None:
        both = _mean_with(variance, units, mean, value, reduced)
        of_mean, node.scope.variances[variance] = both
        return [of_mean]
    # The sum might overflow, so the local means are weighted.
    along = builder.constant(reduced, node.dtype(1))
    (mean_of_tower,) = node.copy([rows, along])
    fraction = units.unit_fraction(layout.unit, rows.dtype)
    part = builder.op("MulNoNan", [mean_of_tower, fraction], node.shapes[0])
    return [Value(PARTIAL, part)]


def _mean_with(
    variance: tf.Operation,
    units: Units,
    mean: tf.Operation,
    value: Value,
    reduced: Sequence[int],
) -> tuple[Value, Value]:
    """Compute a mean of rows, and their variance in the same exchange.

    Args:
        variance: the traced operation of the variance.
        units: the units of rows.
        mean: the traced operation of the mean.
        value: the rows.
        reduced: the axes that both reduce.
    """
    builder = units.builder
    layout, rows = value.as_rows()
    along = builder.constant(reduced, mean.inputs[1].dtype)
    keeps = {"keep_dims": True}
    (own_mean,) = builder.copy(mean, [rows, along])
    squares = builder.op("SquaredDifference", [rows, own_mean], rows.shape)
    (own_variance,) = builder.copy(
        variance, [squares, along], [own_mean.shape], keeps
    )
    means, variances = (
        builder.exchange("gather", tensor, layout.axis)
        for tensor in (own_mean, own_variance)
    )
    fraction = units.unit_fraction(layout.unit, rows.dtype)
    ones = [1] * value.rank
    fraction = builder.op("Reshape", [fraction, ones], ones)
    fractions = fraction
    if fraction.axes:
        # Otherwise all towers have as many rows.
        fractions = builder.exchange("gather", fraction, layout.axis)

    def combine(tensors: Tensor, like: tf.Operation) -> Value:
        # The mean of no rows is NaN.
        weighted = builder.op("MulNoNan", [tensors, fractions], means.shape)
        keeps, shape = like.get_attr("keep_dims"), like.outputs[0].shape
        operands = [weighted, along]
        whole = builder.op("Sum", operands, shape, keep_dims=keeps)
        sizes = [1 if a in reduced else s for a, s in enumerate(value.sizes)]
        left = [s for a, s in enumerate(sizes) if keeps or a not in reduced]
        return Value(REPLICATED, whole=whole, shape=tuple(left))

    of_mean = combine(means, mean)
    deviations = builder.op(
        "SquaredDifference", [means, asserted(of_mean.whole)], means.shape
    )
    variances = builder.op("AddV2", [variances, deviations], means.shape)
    return of_mean, combine(variances, variance)


def _variance_of(mean: tf.Operation) -> tf.Operation | None:
    """Return the operation that computes the variance of a mean, or None."""
    if not mean.get_attr("keep_dims"):
        return None
    entries, axes = mean.inputs
    for squares in _find_squares(mean.outputs[0], entries):
        for user in squares.consumers():
            is_mean = user.type == "Mean" and user.inputs[0] is squares
            if is_mean and _same_axes(user.inputs[1], axes):
                return user
    return None


def _find_squares(
    mean: tf.Tensor, entries: tf.Tensor
) -> Iterator[tf.Operation]:
    """Yield the squared differences between entries and their mean."""
    waiting = [mean]
    while waiting:
        tensor = waiting.pop()
        for user in tensor.consumers():
            if user.type in _COPIES:
                waiting += user.outputs
            elif {*map(id, user.inputs)} != {id(tensor), id(entries)}:
                continue
            elif user.type == "SquaredDifference":
                yield user.outputs[0]
            elif user.type == "Sub":
                for square in user.outputs[0].consumers():
                    if square.type == "Square":
                        yield square.outputs[0]


def _same_axes(one: tf.Tensor, other: tf.Tensor) -> bool:
    if one is other:
        return True
    values = [tf.get_static_value(t) for t in (one, other)]
    if any(value is None for value in values):
        return False
    return sorted(values[0].ravel()) == sorted(values[1].ravel())


# ---- what is known of them ---------------------------------------------------


def _extreme(type_: str, fold: folding.Fold) -> None:
    operation(type_, _reduce_extreme, labels=_reduction, fold=fold)


# fmt: off
_extreme("Prod", folding.reduced(operator.mul, 1))
_extreme("All", folding.reduced(folding.both, True))
_extreme("Any", folding.reduced(folding.one_of, False))
_extreme("Max", folding.exact(folding.reduced(folding.larger)))
_extreme("Min", folding.exact(folding.reduced(folding.lesser)))
operation("Sum", _gradient_of_broadcast, labels=_reduction,
    notes=[row_splits.note_lengths_of_mask],
    fold=folding.reduced(operator.add, 0))
operation("Mean", _mean_of_rows, labels=_reduction)
operation("EuclideanNorm", labels=_reduction)
operation("ArgMax ArgMin", labels=_arg_extreme, notes=[row_numbers.note_limits])
operation("Cumsum", _sum_of_earlier_rows, labels=_cumulative,
    notes=[row_splits.note_row_limits])
operation("Cumprod CumulativeLogsumexp", labels=_cumulative)
operation("L2Loss", labels=_l2_loss)
operation("BiasAddGrad", _bias_gradient_of_images, labels=_bias_gradient)
