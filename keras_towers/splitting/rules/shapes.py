"""Operations that ask for shapes, and that fill or repeat by shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.sizes import UNKNOWN, Size, units_in
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    inserted,
    nonlinear,
    rank_of,
    refuse_others,
    rows_of,
    rule,
    shape_of,
    spread,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
    common,
    of_known,
    same,
)

_SHAPE = "uses a shape that follows from the data"
_EVERY = "repeats every example for every other"


@rule("Shape", "ShapeN", "Size", "Rank")
def _shapes(node: Node, *values: Value) -> Sequence[Value]:
    return [_of_shape(node, k, value) for k, value in enumerate(values)]


def _of_shape(node: Node, index: int, value: Value) -> Value:
    shape = value.shape
    rank = node.rank(index) if shape is None else len(shape)
    if node.type == "Rank" and rank is not None:
        return of_known(rank)
    if shape is None:
        if value.is_same:
            return same()
        raise NotFollowed(_SHAPE)
    sizes = [UNKNOWN if size is None else size for size in shape]
    is_same = value.kind is Kind.SAME and not value.grows
    if node.type != "Size":
        rows = value.rows
        if rows is not None and rows.axis >= 0 and rows.draw is None:
            size = sizes[rows.axis]
            if isinstance(size, Size):
                # For draws of as many rows (`fit/step/draws.py`).
                order = rows.outer, rows.inner
                sizes[rows.axis] = dataclasses.replace(size, order=order)
        return of_known(sizes, is_same)
    whole: Any = math.prod(sizes)
    if whole is UNKNOWN and not is_same:
        raise NotFollowed("uses a size that follows from the data")
    return of_known(whole, is_same)


@rule("BroadcastGradientArgs", "BroadcastArgs", "ConcatOffset")
def _of_shapes(node: Node, *shapes: Value) -> Value:
    if any(s.grows or not s.is_same for s in shapes):
        raise NotFollowed(_SHAPE)
    return same()


@rule("Tile", sizes=(1,))
def _tiled(node: Node, value: Value, times: Value) -> Value:
    if times.known is None:
        raise NotFollowed("repeats a tensor as often as follows from the data")
    before = shape_of(node, 0, value)
    counts = list(times.known)
    shape = tuple(
        None if UNKNOWN in (s, c) or s is None else s * c
        for s, c in zip(before, counts, strict=True)
    )
    grown = [a for a, c in enumerate(counts) if not isinstance(c, int)]
    if value.kind is not Kind.ROWS:
        if not grown:
            return value.with_(shape=shape)
        if any(before[axis] is None for axis in grown):
            raise NotFollowed("repeats rows of which nobody knows how many")
        result = spread(node, value, shape)
        if any(before[axis] == 1 for axis in grown) or result.rows is None:
            return result
        rows = result.rows.in_order(result.rows.outer, result.rows.inner)
        return result.with_(rows=rows, shape=shape)
    if grown:
        raise DoesNotSplit(_EVERY)
    if value.axis is None or counts[value.axis] == 1:
        return value.with_(shape=shape)
    rows, again = node.layouts.resolved(rows_of(value)), counts[value.axis]
    if rows.uniform:
        rows = dataclasses.replace(rows, inner=rows.inner * again)
    else:
        rows = dataclasses.replace(rows, outer=rows.outer * again)
    return value.with_(rows=rows, shape=shape)


@rule("BroadcastTo", sizes=(1,))
def _broadcast(node: Node, value: Value, target: Value) -> Value:
    shape = _known_shape(node, target)
    if value.kind is not Kind.ROWS:
        return spread(node, value, shape)
    rank = len(shape) if shape is not None else node.output_rank()
    if rank is None:
        raise NotFollowed("makes a tensor of unknown rank")
    axis = rows_of(value).axis
    if value.axis is not None:
        axis += rank - rank_of(node, 0, value)
    grown = [a for a, s in enumerate(shape or ()) if units_in(s)]
    if grown not in ([axis], []):
        raise DoesNotSplit(_EVERY)
    return value.moved(axis, shape=shape)


@rule("Fill", sizes=(0,))
def _filled(node: Node, target: Value, value: Value) -> Value:
    return spread(node, value, _known_shape(node, target))


def _known_shape(node: Node, target: Value) -> Shape | None:
    """The shape that is given as an input, as far as it is known."""
    static = node.static_shape()
    if target.known is None:
        if target.is_same and static is not None and not target.grows:
            return static
        return None
    known = tuple(target.known)
    if static is None:
        return known
    return tuple(
        s if k is UNKNOWN or (isinstance(k, int) and k < 0) else k
        for k, s in zip(known, static, strict=True)
    )


@rule("Empty", sizes=(0,))
def _empty(node: Node, target: Value) -> Value:
    if not node.attr("init"):
        raise NotFollowed("makes a tensor of what happens to be in memory")
    return spread(node, same(None), _known_shape(node, target))


@rule("ZerosLike", "OnesLike")
def _filled_like(node: Node, value: Value) -> Value:
    degree = None if node.type == "ZerosLike" else 0
    shape = value.shape
    if value.kind is Kind.ROWS:
        rows = rows_of(value)
        rows = Rows(rows.axis, 1, rows.count, uniform=True, unit=rows.unit)
        return value.with_(degree=degree, rows=rows, shape=shape)
    if shape is None:
        shape = node.static_shape()
    if value.kind is Kind.OTHER and (shape is None or None in shape):
        raise NotFollowed("makes a tensor whose shape follows from the data")
    if shape is None:
        return same(degree)
    return spread(node, same(degree), shape)


@rule("OneHot")
def _one_hot(
    node: Node, indices: Value, depth: Value, on: Value, off: Value
) -> Value:
    nonlinear(node, indices)
    refuse_others([depth], "makes one column for every example")
    if not (on.kind is off.kind is Kind.SAME):
        raise DoesNotSplit("fills with what follows from the batch")
    degree = common((on.degree, off.degree), "chooses between")
    rank = rank_of(node, 0, indices)
    axis = node.attr("axis") % (rank + 1)
    size = None if depth.known is None else depth.known[()]
    entries = indices.with_(degree=degree, shape=indices.shape)
    return inserted(entries, axis, size)


@rule("Range", "LinSpace")
def _range(node: Node, *ends: Value) -> Value:
    refuse_others(ends, "numbers the examples of the batch")
    shape = None
    if node.type == "Range" and all(end.known is not None for end in ends):
        start, end, step = (e.known[()] for e in ends)
        if step == 1:
            shape = (end - start,)
    return same(shape=shape)
