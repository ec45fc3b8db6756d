"""Operations that put entries elsewhere, join tensors and take them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.partition.sizes import UNKNOWN, Size, degree_of, units_in
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    axes_of,
    dropped,
    fixed,
    inserted,
    multiple,
    nonlinear,
    rank_of,
    refuse_others,
    replaced,
    rows_of,
    rule,
    shape_of,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
    common,
    examples,
)

_NOT_FOLLOWED = "reshapes so that the rows of examples cannot be followed"
_ELSEWHERE = "moves the examples of the batch to other places"
_OTHER_ORDERS = "joins the rows of examples in different orders"


@rule("Reshape", sizes=(1,))
def _reshaped(node: Node, value: Value, target: Value) -> Value:
    shape = _target(node, value, target)
    if value.axis is None:
        sizes = [size for size in shape or () if size is not None]
        if value.kind is Kind.SAME and any(degree_of(s) != 0 for s in sizes):
            raise DoesNotSplit("reshapes by the number of examples")
        return value.with_(shape=shape)
    rows, before = rows_of(value), shape_of(node, 0, value)
    grown = [axis for axis, size in enumerate(shape or ()) if units_in(size)]
    if shape is None or len(grown) != 1:
        raise NotFollowed(_NOT_FOLLOWED)
    axis = grown[0]
    count = multiple(shape[axis], rows)
    ahead, ahead_now = _entries(before[: rows.axis]), _entries(shape[:axis])
    if rows.uniform and count == rows.count and ahead == ahead_now:
        return value.moved(axis, shape=shape)
    if rows.draw is not None:
        outer = _outer_of_draw(node, rows, ahead, ahead_now, count)
        node.layouts.use(rows, outer, rows.count // outer)
        rows = rows.in_order(outer, rows.count // outer)
    blocks = ahead * rows.outer
    if blocks % ahead_now or count % (blocks // ahead_now):
        raise DoesNotSplit(
            "reshapes so that a row holds parts of several examples"
        )
    outer = blocks // ahead_now
    rows = rows.in_order(outer, count // outer).at(axis)
    return value.with_(rows=rows, shape=shape)


def _outer_of_draw(
    node: Node, rows: Rows, ahead: int, ahead_now: int, count: int
) -> int:
    """The number of blocks of a draw that a reshape takes for granted."""
    order = node.layouts.order(rows.draw)
    for outer in (order[0],) if order else (1, rows.count):
        blocks = ahead * outer
        if blocks % ahead_now == 0 and count % (blocks // ahead_now) == 0:
            return outer
    return 1


def _entries(sizes: Sequence[Any]) -> int:
    if not all(isinstance(size, int) for size in sizes):
        raise NotFollowed(_NOT_FOLLOWED)
    return math.prod(sizes)


def _target(node: Node, value: Value, target: Value) -> Shape | None:
    """The shape that a tensor is reshaped to."""
    shape: list[Any]
    static = node.static_shape()
    if target.known is not None:
        shape = [None if s == -1 or s is UNKNOWN else s for s in target.known]
        if static is not None:
            shape = [
                s if k is None else k
                for s, k in zip(static, shape, strict=True)
            ]
    elif not target.is_same:
        raise DoesNotSplit("reshapes by what follows from the batch")
    elif static is None:
        return None
    else:
        shape = list(static)
    missing = [axis for axis, size in enumerate(shape) if size is None]
    before = value.shape
    if len(missing) == 1 and before is not None and None not in before:
        whole: Any = math.prod(before)
        rest: Any = math.prod(s for s in shape if s is not None)
        if UNKNOWN not in (whole, rest) and (isinstance(rest, Size) or rest):
            size = whole // rest
            shape[missing[0]] = None if size is UNKNOWN else size
    return tuple(shape)


@rule("Transpose", "ConjugateTranspose", sizes=(1,))
def _transposed(node: Node, value: Value, order: Value) -> Value:
    axes = fixed(order, "an order of axes")
    shape = None
    if value.shape is not None:
        shape = tuple(value.shape[axis] for axis in axes)
    if value.axis is None:
        return value.with_(shape=shape)
    return value.moved(axes.index(value.axis), shape=shape)


@rule("ExpandDims")
def _expanded(node: Node, value: Value, at: Value) -> Value:
    axis = int(np.ravel(np.asarray(fixed(at), dtype=object))[0])
    return inserted(value, axis % (rank_of(node, 0, value) + 1))


@rule("Squeeze")
def _squeezed(node: Node, value: Value) -> Value:
    shape = shape_of(node, 0, value)
    named = {axis % len(shape) for axis in node.attr("squeeze_dims")}
    gone = named or {axis for axis, size in enumerate(shape) if size == 1}
    if not named and not all(isinstance(size, int) for size in shape):
        raise NotFollowed(
            "squeezes axes that are not known before the step runs"
        )
    if value.axis in gone:
        raise DoesNotSplit("squeezes the axis of examples")
    return dropped(value, sorted(gone))


@rule("ReverseV2", "Roll")
def _reversed(node: Node, value: Value, *options: Value) -> Value:
    if value.axis in axes_of(node, options[-1], rank_of(node, 0, value)):
        raise DoesNotSplit(_ELSEWHERE)
    refuse_others(options, "moves entries by what follows from the batch")
    return value.with_(shape=value.shape)


@rule("ReverseSequence")
def _reversed_sequences(node: Node, value: Value, lengths: Value) -> Value:
    nonlinear(node, lengths)
    if value.axis == node.attr("seq_dim"):
        raise DoesNotSplit(_ELSEWHERE)
    if lengths.kind is not Kind.ROWS:
        return value.with_(shape=value.shape)
    if value.kind is Kind.SUM:
        raise DoesNotSplit("reorders a sum over the batch for each example")
    rank = rank_of(node, 0, value)
    column = lengths.moved(node.attr("batch_dim"))
    result = aligned(node, (value, column), value.degree, [rank, rank])
    return result.with_(shape=value.shape)


@rule("Pack")
def _packed(node: Node, *values: Value) -> Value:
    rank = rank_of(node, 0, values[0])
    result = added(node, values, "joins", [rank] * len(values))
    return inserted(result, node.attr("axis") % (rank + 1), len(values))


@rule("Unpack")
def _unpacked(node: Node, value: Value) -> Value:
    axis = node.attr("axis") % rank_of(node, 0, value)
    if value.axis == axis:
        raise DoesNotSplit("takes the examples of the batch apart")
    return dropped(value, [axis])


@rule("ConcatV2")
def _joined(node: Node, *values: Value) -> Value:
    *parts, along = values
    rank = rank_of(node, 0, parts[0])
    axis = int(fixed(along)) % rank
    size: Any = 0
    for part in parts:
        own = None if part.shape is None else part.shape[axis]
        size = None if size is None or own is None else size + own
    with_rows = [part for part in parts if part.axis == axis]
    sums = [p for p in parts if p.kind is Kind.SUM and p.degree is not None]
    if not with_rows or sums:
        shapes = [p.with_(shape=replaced(p.shape, axis, 1)) for p in parts]
        result = added(node, shapes, "joins", [rank] * len(parts))
        return result.with_(shape=replaced(result.shape, axis, size))
    degree = common((p.degree for p in parts), "joins")
    if len(with_rows) < len(parts):
        raise DoesNotSplit("joins examples with rows that are no examples")
    place = [rows_of(part) for part in parts]
    if len({rows.unit for rows in place}) > 1:
        raise DoesNotSplit(_OTHER_ORDERS)
    if all(rows.uniform for rows in place):
        place = [rows.in_order(1, rows.inner) for rows in place]
    place = [node.layouts.resolved(rows) for rows in place]
    inner = {rows.inner for rows in place if not rows.uniform}
    if len(inner) != 1:
        raise DoesNotSplit(_OTHER_ORDERS)
    (each,) = inner
    if any(rows.count % each for rows in place):
        raise DoesNotSplit(_OTHER_ORDERS)
    rows = place[0].in_order(sum(r.count // each for r in place), each)
    shape = replaced(parts[0].shape, axis, size)
    return examples(rows, degree, shape=shape)
