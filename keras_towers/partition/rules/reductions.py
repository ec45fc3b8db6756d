"""Sums, means and extremes along axes, and what runs along one axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import AttrValue
from keras_towers.partition.conversions import local_shape
from keras_towers.partition.factors import ONE, Factors
from keras_towers.partition.layouts import PARTIAL, REPLICATED, Shape, Value
from keras_towers.partition.moments import moments, variance_behind
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import axes, rule, shape_of
from keras_towers.partition.sizes import UNKNOWN, Size

_LINEAR = ("Sum", "Mean")
_OTHERS = ("Max", "Min", "Prod", "All", "Any", "EuclideanNorm")


def numbers(value: Value) -> list[int] | None:
    """Return the entries of a vector or a number, if all are known."""
    if value.known is None:
        return None
    entries = list(np.ravel(value.known))
    if any(isinstance(e, Size) or e is UNKNOWN for e in entries):
        return None
    return [int(entry) for entry in entries]


def axes_of(node: Node, value: Value, index: int = 0) -> list[int] | None:
    """Return the axes that a value names, each 0 or more."""
    found, rank = numbers(value), node.rank(index)
    if found is None or not rank:
        return None
    return sorted({axis % rank for axis in found})


@axes(*_LINEAR, *_OTHERS)
def _reduced_axes(node: Node, value: Value, over: Value) -> Factors | None:
    found, rank = axes_of(node, over), node.rank(0)
    if found is None or rank is None:
        return None
    keeps = node.attr("keep_dims")
    left: list[Any] = [
        ONE if axis in found else axis
        for axis in range(rank)
        if keeps or axis not in found
    ]
    summed = frozenset(found) if node.type == "Sum" else frozenset()
    linear = (frozenset({0}),) if node.type in _LINEAR else ()
    return Factors([range(rank), None], [left], summed, linear)


@rule(*_LINEAR, *_OTHERS)
def _reduced(
    partition: Partitioner, node: Node, value: Value, over: Value
) -> list[Value] | None:
    factors = _reduced_axes(node, value, over)
    found = axes_of(node, over)
    if factors is None or found is None:
        return None
    build, layout = partition.builder, value.sharded
    # What the trace computes from shapes may name other axes of size 1.
    along = build.constant(found, node.dtype(1))
    factors.given[1] = along
    if layout is None or layout.axis not in found or node.type == "Sum":
        return partition.divided(node, [value, over], factors)
    (shape,), (output,) = factors.shapes([value, over]), node.shapes
    assert value.local is not None
    if node.type == "Mean":
        if not node.dtype(0).is_floating:
            return None
        found_before = partition.variances.pop(node.operation.name, None)
        if found_before is not None:
            return [found_before]
        behind = variance_behind(node.operation) if build.meets else None
        if behind is not None:
            mean, partition.variances[behind.name] = moments(
                partition, node.operation, behind, value, layout, along
            )
            return [mean]
        # A sum might be too large for its dtype; no rows have no mean.
        (own_mean,) = build.copy(node.operation, [value.local, along])
        share = partition.share(layout.unit, node.dtype(0))
        own = build.op("MulNoNan", [own_mean, share], output)
        return [Value(PARTIAL, own, shape=shape)]
    if node.type == "EuclideanNorm" or not partition.builder.meets:
        return None
    # That of each tower first, then that of these.
    true = AttrValue(b=True)
    own_sizes = local_shape(node.operation.inputs[0].shape, layout)
    sizes = [1 if a in found else size for a, size in enumerate(own_sizes)]
    (own,) = build.copy(
        node.operation,
        [value.local, along],
        [tf.TensorShape(sizes)],
        {"keep_dims": true},
    )
    every = build.exchange("gather", own, layout.axis)
    (whole,) = build.copy(node.operation, [every, along])
    return [Value(REPLICATED, whole=whole, shape=shape)]


@axes("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _cumulated(node: Node, value: Value, along: Value) -> Factors | None:
    found, rank = axes_of(node, along), node.rank(0)
    if found is None or rank is None:
        return None
    labels = [None if axis in found else axis for axis in range(rank)]
    linear = (frozenset({0}),) if node.type == "Cumsum" else ()
    return Factors([labels, None], [labels], linear=linear)


@axes("ArgMax", "ArgMin")
def _place_of_extreme(node: Node, value: Value, along: Value) -> Factors | None:
    found, rank = axes_of(node, along), node.rank(0)
    if found is None or rank is None:
        return None
    labels = [None if axis in found else axis for axis in range(rank)]
    left = [axis for axis in range(rank) if axis not in found]
    return Factors([labels, None], [left])


@axes("Softmax", "LogSoftmax", "TopK", "TopKV2")
def _along_last(node: Node, value: Value, *rest: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    labels = [*range(rank - 1), None]
    others = [None] * len(rest)
    return Factors([labels, *others], [labels] * node.num_outputs)


@shape_of("TopKV2")
def _of_largest(node: Node, value: Value, count: Value) -> Shape | None:
    if value.shape is None or count.known is None:
        return None
    size = count.known.flat[0]
    return (*value.shape[:-1], None if size is UNKNOWN else size)


@axes("NthElement", "InTopK")
def _of_rows(node: Node, value: Value, *rest: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    ranks = [node.rank(k + 1) or 0 for k in range(len(rest))]
    others = [tuple(range(own)) for own in ranks]
    return Factors([[*range(rank - 1), None], *others], [[*range(rank - 1)]])


@axes("InTopKV2")
def _in_top(
    node: Node, predictions: Value, targets: Value, k: Value
) -> Factors | None:
    return Factors([(0, None), (0,), None], [(0,)])


@axes("SoftmaxCrossEntropyWithLogits")
def _entropy(node: Node, logits: Value, targets: Value) -> Factors | None:
    return Factors([(0, None), (0, None)], [(0,), (0, None)])


@axes("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_entropy(
    node: Node, logits: Value, targets: Value
) -> Factors | None:
    return Factors([(0, None), (0,)], [(0,), (0, None)])


@axes("L2Loss")
def _half_of_squares(node: Node, value: Value) -> Factors | None:
    labels = tuple(range(node.rank(0) or 0))
    return Factors([labels], [()], frozenset(labels))


@axes("BiasAddGrad")
def _bias_gradient(node: Node, value: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    at = 1 if node.attr("data_format") == b"NCHW" else rank - 1
    summed = frozenset(range(rank)) - {at}
    linear = (frozenset({0}),)
    return Factors([range(rank)], [(at,)], summed, linear)
