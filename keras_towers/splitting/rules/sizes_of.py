"""Asking for shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import rule
from keras_towers.splitting.sizes import UNKNOWN, Size
from keras_towers.splitting.values import (
    Kind,
    NotFollowed,
    Value,
    of_known,
    same,
)


@rule("Shape", "ShapeN", "Size", "Rank")
def _shapes(node: Node, *values: Value) -> Sequence[Value]:
    results = []
    for index, value in enumerate(values):
        shape = value.shape
        if shape is None:
            rank = node.rank(index)
            if node.type == "Rank" and rank is not None:
                results.append(of_known(rank))
                continue
            if value.is_same:
                results.append(same())
                continue
            raise NotFollowed("uses a shape that follows from the data")
        sizes = [UNKNOWN if size is None else size for size in shape]
        if node.type == "Rank":
            results.append(of_known(len(sizes)))
        elif node.type == "Size":
            whole: Any = 1
            for size in sizes:
                whole = size * whole
            results.append(
                of_known(whole) if whole is not UNKNOWN else _unknown(value)
            )
        else:
            results.append(_vector(value, sizes))
    return results


def _vector(value: Value, sizes: list[Any]) -> Value:
    rows = value.rows
    if rows is not None and rows.axis >= 0 and rows.draw is None:
        size = sizes[rows.axis]
        if isinstance(size, Size):
            order = rows.outer, rows.inner
            sizes[rows.axis] = dataclasses.replace(size, order=order)
    vector = of_known(np.array(sizes, dtype=object))
    if UNKNOWN in sizes and not value.grows and value.kind is Kind.SAME:
        return same(known=vector.known, shape=vector.shape)
    return vector


def _unknown(value: Value) -> Value:
    if value.kind is Kind.SAME and not value.grows:
        return same(shape=())
    raise NotFollowed("uses a size that follows from the data")


@rule("BroadcastGradientArgs", "BroadcastArgs", "ConcatOffset")
def _of_shapes(node: Node, *shapes: Value) -> list[Value]:
    if any(s.grows or not s.is_same for s in shapes):
        raise NotFollowed("uses a shape that follows from the data")
    return [same() for _ in range(node.num_outputs)]


@rule("TensorListElementShape", "TensorListLength")
def _of_list(node: Node, elements: Value) -> Value:
    if node.type == "TensorListElementShape":
        # A list may have been told less of its elements than is known here.
        if elements.grows and elements.shape is not None:
            return of_known([UNKNOWN] * len(elements.shape))
        return same()
    if elements.items:
        return of_known(elements.items[0])
    if elements.rows is not None and elements.rows.axis < 0:
        raise NotFollowed("uses the length of a list that is not known")
    return same()
