"""Operations that take a part of a tensor, or put it back among zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    fixed,
    multiple,
    rank_of,
    replaced,
    rows_of,
    rule,
    shape_of,
    spread,
)
from keras_towers.splitting.sizes import (
    UNKNOWN,
    degree_of,
    grows,
    times_in,
)
from keras_towers.splitting.slices import Span, spans
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Shape,
    Value,
    common,
    same,
)


@rule("Split", "SplitV")
def _split(node: Node, *values: Value) -> list[Value]:
    value, along = (
        values[::-1] if node.type == "Split" else (values[0], values[2])
    )
    axis = int(fixed(along)) % rank_of(node, 0, value)
    count = node.num_outputs
    sizes: list[Any] = [None] * count
    if node.type == "SplitV" and values[1].known is not None:
        sizes = list(values[1].known)
    elif node.type == "SplitV" and not values[1].is_same:
        raise DoesNotSplit("splits a tensor by what follows from the batch")
    elif value.shape is not None and value.shape[axis] is not None:
        sizes = [value.shape[axis] // count] * count
    shapes = [
        replaced(value.shape, axis, None if s == -1 or s is UNKNOWN else s)
        for s in sizes
    ]
    if value.kind is not Kind.ROWS or rows_of(value).axis != axis:
        return [value.with_(shape=shape) for shape in shapes]
    results, begin = [], 0
    for size, shape in zip(sizes, shapes, strict=True):
        results.append(
            _part(value, axis, begin, size).with_(
                shape=shape, rows=_part(value, axis, begin, size).rows
            )
        )
        begin = begin + size
    return results


def _part(value: Value, axis: int, begin: Any, size: Any) -> Value:
    """Some of the rows of a tensor, along the axis of examples."""
    rows = rows_of(value)
    count = times_in(size, rows.of_each)
    first = 0 if begin == 0 else times_in(begin, rows.of_each)
    if count is None or first is None:
        raise DoesNotSplit("takes some of the examples of the batch")
    if rows.uniform:
        rows = dataclasses.replace(rows, axis=axis, outer=1, inner=count)
        return value.with_(rows=rows)
    if first % rows.inner or count % rows.inner:
        raise DoesNotSplit("takes some of the examples of the batch")
    if first == 0 and count == rows.count:
        return value.moved(axis)
    rows = rows.in_order(count // rows.inner, rows.inner).at(axis)
    return value.with_(rows=rows)


@rule("StridedSlice")
def _strided(node: Node, value: Value, *ends: Value) -> Value:
    shape = shape_of(node, 0, value)
    taken = spans(node, shape, *(end.known for end in ends))
    _check_ends(value, taken, ends)
    result_shape: list[Any] = []
    result: Value | None = None
    for span in taken:
        own = (
            1
            if span.axis is None
            else shape[span.axis]
            if span.size is None
            else span.size
        )
        is_rows = (
            value.rows is not None
            and span.axis is not None
            and span.axis == value.rows.axis
        )
        if is_rows:
            result = _rows_of_span(node, value, span, len(result_shape))
        if not span.dropped:
            result_shape.append(None if own is UNKNOWN else own)
    if result is None:
        result = value
    return result.with_(shape=tuple(result_shape), rows=result.rows)


def _check_ends(
    value: Value, taken: Sequence[Span], ends: Sequence[Value]
) -> None:
    """Refuse a slice of no examples whose ends follow from their number."""
    if all(end.is_same for end in ends):
        return
    for span in taken:
        if value.rows is not None and span.axis == value.rows.axis:
            continue
        sizes = [span.begin, 0 if span.size is None else span.size]
        if span.axis is not None and any(degree_of(s) != 0 for s in sizes):
            raise DoesNotSplit(
                "takes a slice whose ends follow from the number of examples"
            )


def _rows_of_span(node: Node, value: Value, span: Span, axis: int) -> Value:
    if span.dropped:
        raise DoesNotSplit("takes one example of the batch")
    if span.size is None:
        return value.moved(axis)
    if rows_of(value).draw is not None:
        value = value.with_(rows=node.layouts.resolved(rows_of(value)))
    rows = rows_of(value)
    if span.stride == 1:
        return _part(value, axis, span.begin, span.size)
    count = times_in(span.size, rows.of_each)
    if not count or count * span.stride != rows.count:
        raise DoesNotSplit("takes every other row of the batch, or reverses it")
    if rows.inner % span.stride:
        raise DoesNotSplit("takes some of the examples of the batch")
    rows = rows.in_order(rows.outer, rows.inner // span.stride)
    return value.with_(rows=rows.at(axis))


@rule("StridedSliceGrad")
def _strided_gradient(node: Node, target: Value, *values: Value) -> Value:
    *ends, value = values
    if target.known is None:
        raise NotFollowed(
            "takes a slice of a tensor whose shape follows from the data"
        )
    shape = tuple(target.known)
    taken = spans(node, shape, *(end.known for end in ends))
    _check_ends(value, taken, ends)
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return _zeros_around(node, value, shape)
    axis = 0
    for span in taken:
        if (
            axis == rows_of(value).axis
            and not span.dropped
            and span.axis is not None
        ):
            if span.size is None:
                return value.moved(span.axis, shape=shape)
            if span.stride != 1:
                return _spread(node, value, span, shape)
            return _whole(node, value, span.axis, span.begin, shape)
        axis += not span.dropped
    raise NotFollowed("takes a slice that cannot be followed")


def _spread(node: Node, value: Value, span: Span, shape: Shape) -> Value:
    """Rows among zeros, as many of which follow each of them."""
    rows = node.layouts.resolved(rows_of(value))
    assert span.axis is not None
    count = times_in(shape[span.axis], rows.of_each)
    own = times_in(span.size, rows.of_each)
    if own != rows.count or count != rows.count * span.stride:
        raise DoesNotSplit("takes every other row of the batch, or reverses it")
    rows = rows.in_order(rows.outer, rows.inner * span.stride)
    return value.with_(rows=rows.at(span.axis), shape=shape)


def _zeros_around(node: Node, value: Value, shape: Shape) -> Value:
    """What is no example, among zeros, which may be rows of examples."""
    if any(map(grows, shape)):
        if value.degree is None:
            return spread(node, same(None), shape)
        raise DoesNotSplit("puts what is no example into a row of the batch")
    return value.with_(shape=shape)


def _whole(
    node: Node, value: Value, axis: int, begin: Any, shape: Shape
) -> Value:
    """Blocks of rows among blocks of zeros: the gradient of a part."""
    rows = node.layouts.resolved(rows_of(value))
    first = 0 if begin == 0 else times_in(begin, rows.of_each)
    count = multiple(shape[axis], rows)
    if first is None or first % rows.inner or count % rows.inner:
        raise DoesNotSplit("takes some of the examples of the batch")
    rows = rows.in_order(count // rows.inner, rows.inner).at(axis)
    return value.with_(rows=rows, shape=shape)


@rule("Slice")
def _slice(node: Node, value: Value, begin: Value, size: Value) -> Value:
    if begin.known is None or size.known is None:
        raise DoesNotSplit("takes a slice whose ends follow from the data")
    before = shape_of(node, 0, value)
    own = rows_of(value).axis if value.rows is not None else None
    for axis, (f, s) in enumerate(zip(begin.known, size.known, strict=True)):
        grows = degree_of(f) != 0 or degree_of(s) != 0
        if axis != own and grows and not (begin.is_same and size.is_same):
            raise DoesNotSplit(
                "takes a slice whose ends follow from the number of examples"
            )
    shape = tuple(
        (None if b is None else b - f)
        if s == -1
        else None
        if s is UNKNOWN
        else s
        for b, f, s in zip(before, begin.known, size.known, strict=True)
    )
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return value.with_(shape=shape)
    axis = rows_of(value).axis
    rows = _part(value, axis, begin.known[axis], shape[axis]).rows
    return value.with_(rows=rows, shape=shape)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _padded(node: Node, value: Value, widths: Value, *fill: Value) -> Value:
    if fill:
        value = _filled_around(value, fill[0])
    before = shape_of(node, 0, value)
    if widths.known is None:
        raise NotFollowed("pads by what follows from the data")
    pads = widths.known
    own = rows_of(value).axis if value.rows is not None else None
    for axis, ends in enumerate(pads):
        if axis != own and any(degree_of(end) != 0 for end in ends):
            if value.degree is None:
                continue
            raise DoesNotSplit("pads by the number of examples")
    sign = -1 if node.type == "MirrorPadGrad" else 1
    shape = tuple(
        None if s is None or UNKNOWN in (a, b) else s + sign * (a + b)
        for s, (a, b) in zip(before, pads, strict=True)
    )
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return (
            value.with_(shape=shape)
            if value.kind is not Kind.SAME
            else _zeros_around(node, value, shape)
        )
    rows = rows_of(value)
    ahead, behind = pads[rows.axis]
    if ahead == 0 and behind == 0:
        return value.with_(shape=shape)
    # Zeros for other blocks of the batch: the gradient of a slice.
    if node.type == "Pad" and not rows.uniform:
        return _whole(node, value, rows.axis, ahead, shape)
    raise DoesNotSplit("adds rows to the batch")


def _filled_around(value: Value, fill: Value) -> Value:
    """What a tensor is if it is put among others of one entry."""
    if fill.kind is not Kind.SAME:
        raise DoesNotSplit("pads with what follows from the batch")
    own, outside = value.degree, fill.degree
    if value.kind is Kind.SUM:
        outside = fill.degree_as_sum
    degree = common((own, outside), "joins")
    return value.with_(degree=degree, shape=value.shape)
