"""What the trace itself says of a tensor, besides the rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition import folding
from keras_towers.partition.folding import LARGEST
from keras_towers.partition.sizes import Size, grows
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.values import (
    Kind,
    Value,
    of_known,
    other,
    same,
)

_HANDLES = (tf.resource, tf.variant)


def folded(node: Node, given: Sequence[Value]) -> list[Value] | None:
    """Return the outputs of an operation on known inputs, or None."""
    results = folding.folded(node, [value.known for value in given])
    if results is None:
        return None
    # What is not known of it is not known of any tower, and the same.
    alike = all(v.is_same and not v.grows for v in given)
    return [of_known(entries, alike) for entries in results]


def constant(operation: Any) -> Value:
    """Return the value of a constant, with its entries if they are few."""
    proto = operation.get_attr("value")
    shape = tuple(dimension.size for dimension in proto.tensor_shape.dim)
    size = math.prod(shape)
    dtype = tf.as_dtype(proto.dtype)
    if dtype in _HANDLES or dtype == tf.string:
        return same(shape=shape)
    # A constant of one number is kept as that.
    if size > LARGEST and len(proto.tensor_content) > dtype.size:
        return same(shape=shape)
    array = tf.make_ndarray(proto)
    if size > LARGEST or not (dtype.is_integer or dtype.is_bool or size == 1):
        return same(0 if array.any() else None, shape=shape)
    return of_known(np.array(array.tolist(), dtype=object).reshape(shape))


def clamped(node: Node, given: Sequence[Value]) -> Value | None:
    """Return a number that is both the least and the largest; None: none is."""
    if node.type != "Minimum" or node.static_shape() != ():
        return None
    for limit, tensor in zip(given, node.operation.inputs[::-1], strict=True):
        if limit.known is None or tensor.op.type != "Maximum":
            continue
        largest = limit.known.flat[0]
        known = [constant(t.op).known for t in _constants(tensor.op.inputs)]
        least = [k.flat[0] for k in known if k is not None and k.size == 1]
        numbers = all(isinstance(n, int) for n in (largest, *least))
        if numbers and least and max(least) >= largest:
            return of_known(largest)
    return None


def _constants(tensors: Sequence[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor.op.type == "Const"]


def completed(
    node: Node, index: int, value: Value, given: Sequence[Value]
) -> Value:
    """Add what the trace knows of the shape, and check the rule by it.

    What grows with the batch has to be the axis that the rule names.
    """
    if value.kind in (Kind.HANDLE, Kind.OPTIONAL):
        return value
    if value.kind is Kind.OTHER:
        if value.reason is not None and value.reason.operation is None:
            reason = dataclasses.replace(value.reason, operation=node.operation)
            value = dataclasses.replace(value, reason=reason)
        static = node.static_shape(index)
        if value.shape is None and static is not None and None not in static:
            value = dataclasses.replace(value, shape=static)
        return value
    if node.output_dtype(index) in _HANDLES:
        return value
    static = node.static_shape(index)
    if static is None:
        static = value.shape
        if static is None:
            if value.is_same and not any(v.grows for v in given):
                return value
            text = "makes a tensor of unknown rank"
            return other(text, node.operation, is_open=True)
        static = tuple(s if isinstance(s, int) else None for s in static)
    own = value.shape
    if own is not None and len(own) != len(static):
        own = None
    axis = value.rows.axis if value.rows is not None else None
    sizes: list[Any] = []
    for place, size in enumerate(static):
        claimed = None if own is None else own[place]
        if place == axis:
            if size is not None:
                return _lost(node)
            assert value.rows is not None
            whole = value.rows.count * value.rows.of_each
            if grows(claimed) and claimed != whole:
                return _lost(node)
            sizes.append(whole)
        elif grows(claimed):
            return _lost(node)
        elif size is not None:
            sizes.append(size)
        else:
            sizes.append(claimed if isinstance(claimed, (int, Size)) else None)
    if None in sizes and not _may_be_open(value, given):
        return _lost(node)
    if value.known is not None and value.known.shape != tuple(sizes):
        value = dataclasses.replace(value, known=None)
    return dataclasses.replace(value, shape=tuple(sizes))


def _may_be_open(value: Value, given: Sequence[Value]) -> bool:
    """Whether a size that is not known is no number of examples."""
    if not any(v.grows for v in given):
        return True
    # Some input has such a size, and no two that could be taken for another.
    return any(v.shape is not None and None in v.shape for v in given)


def _lost(node: Node) -> Value:
    return other(
        "moves the rows of examples where they cannot be followed",
        node.operation,
        is_open=True,
    )
