"""Operations over whole axes."""

from __future__ import annotations

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    aligned,
    axes_of,
    dropped,
    fixed,
    free,
    rank_of,
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
    rank = rank_of(node, 0, value)
    axes = axes_of(node, over, rank)
    keeps = node.attr("keep_dims")
    shape: Shape | None = value.shape
    if keeps:
        for axis in axes:
            shape = replaced(shape, axis, 1)
    else:
        shape = without(shape, *axes)
    whole = node.dtype(0).is_integer and node.type == "Mean"
    over_batch = value.rows is not None and value.rows.axis in axes
    if whole and (value.kind is Kind.SUM or over_batch):
        raise DoesNotSplit("rounds a mean over the batch")
    if whole:
        free(node, value)
    if value.kind is Kind.SUM:
        if node.type not in ("Sum", "Mean"):
            raise DoesNotSplit(
                f"takes {node.type} of a sum or mean over the batch"
            )
        return value.with_(shape=shape)
    if node.type == "Prod":
        free(node, value)
    if value.kind is not Kind.ROWS:
        return value.with_(shape=shape)
    rows = rows_of(value)
    if rows.axis not in axes:
        if keeps:
            return value.with_(shape=shape)
        return dropped(value, axes).with_(
            rows=dropped(value, axes).rows, shape=shape
        )
    if rows.unit is not None and node.type != "Sum":
        raise DoesNotSplit(_WHAT.get(node.type, _MEAN_OF_PARTS))
    if rows.uniform and rows.unit is None:
        counted = node.type in ("Sum", "Prod")
        if node.type in ("Prod", "EuclideanNorm"):
            raise DoesNotSplit(_WHAT[node.type])
        return same(product(value.degree, int(counted)), shape=shape)
    if node.type not in ("Sum", "Mean"):
        raise DoesNotSplit(_WHAT[node.type])
    fewer = -int(node.type == "Mean")
    return total(product(value.degree, fewer), shape=shape)


@rule("ArgMax", "ArgMin")
def _place_of_extreme(node: Node, value: Value, over: Value) -> Value:
    refuse_sums(node, (value,))
    axis = int(fixed(over)) % rank_of(node, 0, value)
    if value.kind is Kind.ROWS and rows_of(value).axis == axis:
        raise DoesNotSplit("asks which example of the batch is the largest")
    return dropped(value, [axis]).with_(
        degree=0, shape=without(value.shape, axis)
    )


@rule("BiasAddGrad")
def _bias_gradient(node: Node, value: Value) -> Value:
    shape = shape_of(node, 0, value)
    axis = 1 if node.attr("data_format") == b"NCHW" else len(shape) - 1
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return value.with_(shape=(shape[axis],))
    if rows_of(value).axis == axis:
        raise DoesNotSplit("adds examples as a bias")
    counted = rows_of(value).uniform and rows_of(value).unit is None
    degree = product(value.degree, 1) if counted else value.degree
    kind = same if counted else total
    return kind(degree, shape=(shape[axis],))


@rule("L2Loss")
def _half_squares(node: Node, value: Value) -> Value:
    if value.degree is None:
        return same(None, shape=())
    if value.kind is Kind.SUM:
        raise DoesNotSplit(
            "takes the norm of a sum over the batch, such as a gradient"
        )
    degree = power(value.degree, 2)
    if value.kind is Kind.ROWS and rows_of(value).axis < 0:
        return value.with_(degree=degree, shape=())
    kind = total if value.kind is Kind.ROWS else same
    return kind(degree, shape=())


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _accumulated(node: Node, value: Value, along: Value) -> Value:
    axis = int(fixed(along)) % rank_of(node, 0, value)
    if value.kind is Kind.ROWS and rows_of(value).axis == axis:
        raise DoesNotSplit("accumulates along the batch")
    if node.type != "Cumsum":
        refuse_sums(node, (value,))
        # Of nothing it is 1, or the logarithm of a number.
        return value.with_(degree=free(node, value), shape=value.shape)
    return value.with_(shape=value.shape)


@rule("Softmax", "LogSoftmax")
def _softmax(node: Node, logits: Value) -> Value:
    refuse_sums(node, (logits,))
    free(node, logits)
    _refuse_last(node, logits)
    return logits.with_(degree=0, shape=logits.shape)


@rule("TopKV2")
def _largest(node: Node, value: Value, *count: Value) -> list[Value]:
    refuse_sums(node, (value,))
    _refuse_last(node, value)
    if any(not k.is_same for k in count):
        raise DoesNotSplit(
            "takes a number of largest values that follows from the batch"
        )
    shape = node.static_shape()
    places = value.with_(degree=0, shape=shape)
    return [value.with_(shape=shape), places]


@rule("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(node: Node, logits: Value, labels: Value) -> list[Value]:
    values = logits, labels
    refuse_sums(node, values)
    free(node, *values)
    for value in values:
        _refuse_last(node, value)
    gradient = aligned(node, values, 0)
    return _per_example(gradient)


@rule("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(
    node: Node, logits: Value, labels: Value
) -> list[Value]:
    refuse_sums(node, (logits, labels))
    free(node, logits, labels)
    _refuse_last(node, logits)
    losses = aligned_first(node, logits, labels)
    if losses.rows is None:
        return [losses, losses.with_(shape=logits.shape)]
    return [losses, losses.moved(0, shape=logits.shape)]


def _per_example(gradient: Value) -> list[Value]:
    """A loss for each row, and the gradient of the logits."""
    shape = gradient.shape
    losses = None if shape is None else shape[:-1]
    return [gradient.with_(shape=losses), gradient]


@rule("InTopKV2", "InTopK")
def _is_among_largest(
    node: Node, logits: Value, targets: Value, *count: Value
) -> Value:
    refuse_sums(node, (logits, targets))
    free(node, logits)
    _refuse_last(node, logits)
    return aligned_first(node, logits, targets)


def aligned_first(node: Node, logits: Value, targets: Value) -> Value:
    """Return a value for each row of logits and of targets."""
    rows = (
        dropped(logits, [1])
        if logits.kind is Kind.ROWS
        else same(shape=without(logits.shape, 1))
    )
    return aligned(node, (rows, targets), 0, [1, 1])


def _refuse_last(node: Node, value: Value) -> None:
    if (
        value.kind is Kind.ROWS
        and rows_of(value).axis == rank_of(node, 0, value) - 1
    ):
        raise DoesNotSplit(f"takes {node.type} over the examples of the batch")


@rule("HistogramFixedWidth")
def _histogram(node: Node, value: Value, *ends: Value) -> Value:
    refuse_sums(node, (value,))
    if any(not end.is_same for end in ends):
        raise DoesNotSplit(
            "takes a histogram over ends that follow from the batch"
        )
    free(node, value)
    return total(0) if value.kind is Kind.ROWS else same()


@rule("NthElement")
def _nth(node: Node, value: Value, place: Value) -> Value:
    refuse_sums(node, (value,))
    _refuse_last(node, value)
    return dropped(value, [rank_of(node, 0, value) - 1])


@rule("InvertPermutation")
def _inverted(node: Node, value: Value) -> Value:
    if not value.is_same or value.grows:
        raise DoesNotSplit("reorders the examples of the batch")
    return value.with_(shape=value.shape)
