"""Operations over whole axes."""

from __future__ import annotations

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    aligned,
    axes_of,
    dropped,
    fixed,
    free,
    nonlinear,
    rank_of,
    refuse_others,
    refuse_sums,
    replaced,
    rows_of,
    rule,
    shape_of,
    without,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Shape,
    Value,
    power,
    product,
    same,
    total,
)

_MEAN_OF_PARTS = "takes a mean over entries, of which examples have as many \
as follow from them"
_WHAT = {
    "Max": "takes the largest value of the batch",
    "Min": "takes the smallest value of the batch",
    "All": "asks whether all examples of the batch are something",
    "Any": "asks whether any example of the batch is something",
    "Prod": "multiplies the examples of the batch",
    "EuclideanNorm": "takes a norm over the batch",
}


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _reduced(node: Node, value: Value, over: Value) -> Value:
    kind = node.type
    axes = axes_of(node, over, rank_of(node, 0, value))
    shape: Shape | None = without(value.shape, *axes)
    if node.attr("keep_dims"):
        shape = value.shape
        for axis in axes:
            shape = replaced(shape, axis, 1)
    over_batch = value.axis in axes
    if kind == "Mean" and node.dtype(0).is_integer:
        if value.kind is Kind.SUM or over_batch:
            raise DoesNotSplit("rounds a mean over the batch")
        free(node, value)
    if kind not in ("Sum", "Mean"):
        refuse_sums(node, (value,))
    if kind == "Prod":
        free(node, value)
    if not over_batch:
        kept = value if node.attr("keep_dims") else dropped(value, axes)
        return kept.with_(shape=shape)
    rows = rows_of(value)
    if rows.unit is not None and kind != "Sum":
        raise DoesNotSplit(_WHAT.get(kind, _MEAN_OF_PARTS))
    alike = rows.uniform and rows.unit is None
    linear = kind in ("Sum", "Mean")
    if not linear and (not alike or kind in ("Prod", "EuclideanNorm")):
        raise DoesNotSplit(_WHAT[kind])
    if alike:
        counted = product(value.degree, int(kind == "Sum"))
        return same(counted, shape=shape)
    return total(product(value.degree, -int(kind == "Mean")), shape=shape)


@rule("ArgMax", "ArgMin")
def _place_of_extreme(node: Node, value: Value, over: Value) -> Value:
    refuse_sums(node, (value,))
    axis = int(fixed(over)) % rank_of(node, 0, value)
    if value.axis == axis:
        raise DoesNotSplit("asks which example of the batch is the largest")
    place = dropped(value, [axis])
    return place.with_(degree=0, shape=place.shape)


@rule("BiasAddGrad")
def _bias_gradient(node: Node, value: Value) -> Value:
    shape = shape_of(node, 0, value)
    axis = 1 if node.attr("data_format") == b"NCHW" else len(shape) - 1
    own = (shape[axis],)
    if value.axis is None:
        return value.with_(shape=own)
    if value.axis == axis:
        raise DoesNotSplit("adds examples as a bias")
    if rows_of(value).uniform and rows_of(value).unit is None:
        return same(product(value.degree, 1), shape=own)
    return total(value.degree, shape=own)


@rule("L2Loss")
def _half_squares(node: Node, value: Value) -> Value:
    if value.degree is None:
        return same(None, shape=())
    if value.kind is Kind.SUM:
        raise DoesNotSplit(
            "takes the norm of a sum over the batch, such as a gradient"
        )
    degree = power(value.degree, 2)
    if value.axis is not None:
        return total(degree, shape=())
    return value.with_(degree=degree, shape=())


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _accumulated(node: Node, value: Value, along: Value) -> Value:
    if value.axis == int(fixed(along)) % rank_of(node, 0, value):
        raise DoesNotSplit("accumulates along the batch")
    degree = value.degree
    if node.type != "Cumsum":
        # Of nothing it is 1, or the logarithm of a number.
        degree = nonlinear(node, value)
    return value.with_(degree=degree, shape=value.shape)


@rule("Softmax", "LogSoftmax")
def _softmax(node: Node, logits: Value) -> Value:
    degree = nonlinear(node, logits)
    _refuse_last(node, logits)
    return logits.with_(degree=degree, shape=logits.shape)


@rule("TopKV2")
def _largest(node: Node, value: Value, *count: Value) -> list[Value]:
    refuse_sums(node, (value,))
    _refuse_last(node, value)
    text = "takes a number of largest values that follows from the batch"
    refuse_others(count, text)
    largest = value.with_(shape=node.static_shape())
    return [largest, largest.with_(degree=0, shape=largest.shape)]


@rule("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(node: Node, logits: Value, labels: Value) -> list[Value]:
    values = logits, labels
    nonlinear(node, *values)
    for value in values:
        _refuse_last(node, value)
    gradient = aligned(node, values, 0)
    losses = None if gradient.shape is None else gradient.shape[:-1]
    return [gradient.with_(shape=losses), gradient]


@rule("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(
    node: Node, logits: Value, labels: Value
) -> list[Value]:
    nonlinear(node, logits, labels)
    losses = _of_each(node, logits, labels)
    if losses.axis is None:
        return [losses, losses.with_(shape=logits.shape)]
    return [losses, losses.moved(0, shape=logits.shape)]


@rule("InTopKV2", "InTopK")
def _is_among_largest(
    node: Node, logits: Value, targets: Value, *count: Value
) -> Value:
    refuse_sums(node, (logits, targets))
    free(node, logits)
    return _of_each(node, logits, targets)


def _of_each(node: Node, logits: Value, targets: Value) -> Value:
    """A value for each row of logits and of targets."""
    _refuse_last(node, logits)
    rows = dropped(logits, [1])
    return aligned(node, (rows, targets), 0, [1, 1])


def _refuse_last(node: Node, value: Value) -> None:
    last = rank_of(node, 0, value) - 1
    if value.axis == last:
        raise DoesNotSplit(f"takes {node.type} over the examples of the batch")


@rule("HistogramFixedWidth")
def _histogram(node: Node, value: Value, *ends: Value) -> Value:
    text = "takes a histogram over ends that follow from the batch"
    refuse_sums(node, (value,))
    refuse_others(ends, text)
    free(node, value)
    return total(0) if value.kind is Kind.ROWS else same()


@rule("NthElement")
def _nth(node: Node, value: Value, place: Value) -> Value:
    refuse_sums(node, (value,))
    _refuse_last(node, value)
    refuse_others([place], "takes an entry whose rank follows from the batch")
    return dropped(value, [rank_of(node, 0, value) - 1])


@rule("InvertPermutation")
def _inverted(node: Node, value: Value) -> Value:
    if not value.is_same or value.grows:
        raise DoesNotSplit("reorders the examples of the batch")
    return value.with_(shape=value.shape)
