"""Operations that put entries elsewhere, or repeat them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    aligned,
    axes_of,
    dropped,
    fixed,
    free,
    inserted,
    multiple,
    rank_of,
    refuse_sums,
    rows_of,
    rule,
    shape_of,
)
from keras_towers.splitting.sizes import (
    UNKNOWN,
    Size,
    degree_of,
    units_in,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
)


@rule("Reshape")
def _reshaped(node: Node, value: Value, target: Value) -> Value:
    shape = _target(node, value, target)
    if value.kind is not Kind.ROWS:
        sizes = [size for size in shape or () if size is not None]
        if value.kind is Kind.SAME and any(degree_of(s) != 0 for s in sizes):
            raise DoesNotSplit("reshapes by the number of examples")
        return value.with_(shape=shape)
    rows = rows_of(value)
    if rows.axis < 0:
        return value.with_(shape=shape)
    before = shape_of(node, 0, value)
    if shape is None:
        raise NotFollowed(
            "reshapes so that the rows of examples cannot be followed"
        )
    grown = [axis for axis, size in enumerate(shape) if units_in(size)]
    if len(grown) != 1:
        raise NotFollowed(
            "reshapes so that the rows of examples cannot be followed"
        )
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
    if rows.uniform:
        # Entries are alike along this axis only.
        if ahead != ahead_now or count != rows.count:
            rows = rows.in_order(rows.outer, rows.inner)
        else:
            return value.moved(axis, shape=shape)
    rows = rows.in_order(outer, count // outer).at(axis)
    return Value(Kind.ROWS, value.degree, rows, shape=shape)


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
        raise NotFollowed(
            "reshapes so that the rows of examples cannot be followed"
        )
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
        if (
            rest is UNKNOWN
            or whole is UNKNOWN
            or (not isinstance(rest, Size) and not rest)
        ):
            return tuple(shape)
        size = (
            whole // rest
            if isinstance(whole, Size) or isinstance(rest, Size)
            else whole // rest
        )
        shape[missing[0]] = None if size is UNKNOWN else size
    return tuple(shape)


@rule("Transpose", "ConjugateTranspose")
def _transposed(node: Node, value: Value, order: Value) -> Value:
    axes = fixed(order, "an order of axes")
    shape = None
    if value.shape is not None:
        shape = tuple(value.shape[axis] for axis in axes)
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return value.with_(shape=shape)
    return value.moved(axes.index(rows_of(value).axis), shape=shape)


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
    if value.rows is not None and value.rows.axis in gone:
        raise DoesNotSplit("squeezes the axis of examples")
    return dropped(value, sorted(gone))


@rule("ReverseV2", "Roll")
def _reversed(node: Node, value: Value, *options: Value) -> Value:
    axes = axes_of(node, options[-1], rank_of(node, 0, value))
    if value.rows is not None and value.rows.axis in axes:
        raise DoesNotSplit("moves the examples of the batch to other places")
    if any(not option.is_same for option in options):
        raise DoesNotSplit("moves entries by what follows from the batch")
    return value.with_(shape=value.shape)


@rule("ReverseSequence")
def _reversed_sequences(node: Node, value: Value, lengths: Value) -> Value:
    refuse_sums(node, (lengths,))
    free(node, lengths)
    batch, along = node.attr("batch_dim"), node.attr("seq_dim")
    rank = rank_of(node, 0, value)
    if value.rows is not None and value.rows.axis == along:
        raise DoesNotSplit("moves the examples of the batch to other places")
    if lengths.kind is Kind.ROWS:
        ranked = inserted_at(lengths, batch, rank)
        if value.kind is Kind.SUM:
            raise DoesNotSplit("reorders a sum over the batch for each example")
        result = aligned(node, (value, ranked), value.degree, [rank, rank])
        return result.with_(shape=value.shape)
    return value.with_(shape=value.shape)


def inserted_at(lengths: Value, axis: int, rank: int) -> Value:
    """Return a vector as a tensor of a rank, whose other axes have size 1."""
    shape = [1] * rank
    size = None if lengths.shape is None else lengths.shape[0]
    return lengths.moved(axis, shape=(*shape[:axis], size, *shape[axis + 1 :]))
