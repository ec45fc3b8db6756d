"""Operations that repeat entries, or fill tensors with them."""

from __future__ import annotations

import dataclasses

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    free,
    inserted,
    rank_of,
    refuse_sums,
    rows_of,
    rule,
    shape_of,
    spread,
)
from keras_towers.splitting.sizes import (
    UNKNOWN,
    units_in,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
    common,
    same,
)


@rule("Tile")
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
    rows = rows_of(value)
    if grown:
        raise DoesNotSplit("repeats every example for every other")
    if rows.axis < 0:
        return value.with_(shape=shape)
    again = counts[rows.axis]
    if again == 1:
        return value.with_(shape=shape)
    if rows.draw is not None:
        rows = node.layouts.resolved(rows)
    outer, inner = rows.outer, rows.inner
    if rows.uniform:
        inner *= again
    else:
        outer *= again
    rows = dataclasses.replace(rows, outer=outer, inner=inner)
    return value.with_(rows=rows, shape=shape)


@rule("BroadcastTo")
def _broadcast(node: Node, value: Value, target: Value) -> Value:
    shape = _known_shape(node, target)
    if value.kind is not Kind.ROWS:
        return spread(node, value, shape)
    rank = len(shape) if shape is not None else node.output_rank()
    if rank is None:
        raise NotFollowed("makes a tensor of unknown rank")
    rows = rows_of(value)
    grown = [a for a, s in enumerate(shape or ()) if units_in(s)]
    axis = (
        rows.axis
        if rows.axis < 0
        else rows.axis + rank - rank_of(node, 0, value)
    )
    if grown not in ([axis], []):
        raise DoesNotSplit("repeats every example for every other")
    return value.moved(axis, shape=shape)


@rule("Fill")
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


@rule("Empty")
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
        filled = value.with_(degree=degree, rows=rows, shape=shape)
        return dataclasses.replace(filled, items=value.items)
    if shape is None:
        shape = node.static_shape()
    if value.kind is Kind.OTHER and (shape is None or None in shape):
        raise NotFollowed("makes a tensor whose shape follows from the data")
    return (
        spread(node, same(degree), shape) if shape is not None else same(degree)
    )


@rule("OneHot")
def _one_hot(
    node: Node, indices: Value, depth: Value, on: Value, off: Value
) -> Value:
    refuse_sums(node, (indices,))
    free(node, indices)
    if not depth.is_same:
        raise DoesNotSplit("makes one column for every example")
    if not (on.kind is off.kind is Kind.SAME):
        raise DoesNotSplit("fills with what follows from the batch")
    degree = common((on.degree, off.degree), "chooses between")
    rank = rank_of(node, 0, indices)
    axis = node.attr("axis") % (rank + 1)
    size = None if depth.known is None else depth.known[()]
    return inserted(
        indices.with_(degree=degree, shape=indices.shape), axis, size
    )


@rule("Range", "LinSpace")
def _range(node: Node, *ends: Value) -> Value:
    if any(not end.is_same for end in ends):
        raise DoesNotSplit("numbers the examples of the batch")
    shape = None
    if node.type == "Range" and all(end.known is not None for end in ends):
        start, end, step = (e.known[()] for e in ends)
        if step == 1:
            shape = (end - start,)
    return same(shape=shape)
