"""Operations that take a part of a tensor, or put it back among zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.sizes import UNKNOWN, degree_of, grows, times_in
from keras_towers.partition.slices import Span, spans
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    fixed,
    multiple,
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
    Shape,
    Value,
    common,
    same,
)

_ENDS = "takes a slice whose ends follow from the number of examples"
_SOME = "takes some of the examples of the batch"
_EVERY_OTHER = "takes every other row of the batch, or reverses it"


@rule("Split")
def _split(node: Node, along: Value, value: Value) -> list[Value]:
    axis, count = int(fixed(along)), node.num_outputs
    size = shape_of(node, 1, value)[axis]
    each = UNKNOWN if size is None else size // count
    return _split_into(node, value, 1, axis, [each] * count)


@rule("SplitV", sizes=(1,))
def _split_at(
    node: Node, value: Value, sizes: Value, along: Value
) -> list[Value]:
    parts: list[Any] = [UNKNOWN] * node.num_outputs
    if sizes.known is not None:
        parts = [UNKNOWN if s == -1 else s for s in sizes.known]
    else:
        text = "splits a tensor by what follows from the batch"
        refuse_others([sizes], text)
    return _split_into(node, value, 0, int(fixed(along)), parts)


def _split_into(
    node: Node, value: Value, index: int, axis: int, sizes: Sequence[Any]
) -> list[Value]:
    shape = shape_of(node, index, value)
    results, begin = [], 0
    for size in sizes:
        taken = [Span(a) for a in range(len(shape))]
        taken[axis] = Span(axis % len(shape), begin, size)
        results.append(_taken(node, value, shape, taken))
        begin = begin + size
    return results


@rule("StridedSlice", sizes=(1, 2, 3))
def _strided(node: Node, value: Value, *ends: Value) -> Value:
    shape = shape_of(node, 0, value)
    taken = _spans(node, shape, ends)
    _check_ends(value, taken, ends)
    return _taken(node, value, shape, taken)


@rule("Slice", sizes=(1, 2))
def _slice(node: Node, value: Value, *ends: Value) -> Value:
    begin, size = map(_entries_of, ends)
    if begin is None or size is None:
        raise DoesNotSplit("takes a slice whose ends follow from the data")
    shape = shape_of(node, 0, value)
    taken = []
    for axis, whole in enumerate(shape):
        first, count = begin[axis], size[axis]
        if count == -1:
            count = UNKNOWN if whole is None else whole - first
        all_of_it = first == 0 and count == whole
        taken.append(Span(axis) if all_of_it else Span(axis, first, count))
    _check_ends(value, taken, ends)
    return _taken(node, value, shape, taken)


def _spans(node: Node, shape: Shape, ends: Sequence[Value]) -> list[Span]:
    taken = spans(node, shape, *map(_entries_of, ends))
    if taken is None:
        raise DoesNotSplit("takes a slice whose ends follow from the data")
    return taken


def _entries_of(end: Value) -> Any:
    """What is known of the entries of a slice's end; None: not even if same."""
    if end.known is not None or not end.is_same or not end.shape:
        return end.known
    (count,) = end.shape
    return [UNKNOWN] * count if isinstance(count, int) else None


def _check_ends(
    value: Value, taken: Sequence[Span], ends: Sequence[Value]
) -> None:
    """Refuse a slice of no examples whose ends follow from their number."""
    if all(end.is_same for end in ends):
        return
    for span in taken:
        if span.axis is None or span.axis == value.axis:
            continue
        sizes = [span.begin, 0 if span.size is None else span.size]
        if any(degree_of(s) != 0 for s in sizes):
            raise DoesNotSplit(_ENDS)


def _taken(
    node: Node, value: Value, shape: Shape, taken: Sequence[Span]
) -> Value:
    """What is left of a tensor of which a part of each axis is taken."""
    left: list[Any] = []
    result = value
    for span in taken:
        size: Any = 1
        if span.axis is not None:
            size = shape[span.axis] if span.size is None else span.size
            if span.axis == value.axis:
                result = _rows_of_span(node, value, span, len(left))
        if not span.dropped:
            left.append(None if size is UNKNOWN else size)
    return result.with_(shape=tuple(left))


def _rows_of_span(node: Node, value: Value, span: Span, axis: int) -> Value:
    """What is left of the rows of a tensor, along another axis."""
    if span.dropped:
        raise DoesNotSplit("takes one example of the batch")
    if span.size is None:
        return value.moved(axis)
    rows = node.layouts.resolved(rows_of(value))
    count = times_in(span.size, rows.of_each)
    if span.stride != 1:
        if not count or count * span.stride != rows.count:
            raise DoesNotSplit(_EVERY_OTHER)
        if rows.inner % span.stride:
            raise DoesNotSplit(_SOME)
        rows = rows.in_order(rows.outer, rows.inner // span.stride)
        return value.with_(rows=rows.at(axis))
    first = _blocks_ahead(value, span.begin)
    if count is None or first is None:
        raise DoesNotSplit(_SOME)
    if rows.uniform:
        rows = dataclasses.replace(rows, axis=axis, outer=1, inner=count)
        return value.with_(rows=rows)
    if first % rows.inner or count % rows.inner:
        raise DoesNotSplit(_SOME)
    if first == 0 and count == rows.count:
        return value.moved(axis)
    rows = rows.in_order(count // rows.inner, rows.inner)
    return value.with_(rows=rows.at(axis))


def _blocks_ahead(value: Value, begin: Any) -> int | None:
    """How many rows of each example there are before an index, if known."""
    return 0 if begin == 0 else times_in(begin, rows_of(value).of_each)


@rule("StridedSliceGrad", sizes=(0, 1, 2, 3))
def _strided_gradient(node: Node, target: Value, *values: Value) -> Value:
    *ends, value = values
    if target.known is None:
        raise NotFollowed(
            "takes a slice of a tensor whose shape follows from the data"
        )
    shape = tuple(target.known)
    taken = _spans(node, shape, ends)
    _check_ends(value, taken, ends)
    if value.axis is None:
        return _zeros_around(node, value, shape)
    span = [span for span in taken if not span.dropped][value.axis]
    if span.axis is None:
        raise NotFollowed("takes a slice that cannot be followed")
    if span.size is None:
        return value.moved(span.axis, shape=shape)
    if span.stride == 1:
        return _whole(node, value, span.axis, span.begin, shape)
    # Each row is followed by as many zeros.
    rows = node.layouts.resolved(rows_of(value))
    count = times_in(shape[span.axis], rows.of_each)
    own = times_in(span.size, rows.of_each)
    if own != rows.count or count != rows.count * span.stride:
        raise DoesNotSplit(_EVERY_OTHER)
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
    first = _blocks_ahead(value, begin)
    count = multiple(shape[axis], rows)
    if first is None or first % rows.inner or count % rows.inner:
        raise DoesNotSplit(_SOME)
    rows = rows.in_order(count // rows.inner, rows.inner).at(axis)
    return value.with_(rows=rows, shape=shape)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", sizes=(1,))
def _padded(node: Node, value: Value, widths: Value, *fill: Value) -> Value:
    if fill:
        value = _filled_around(value, fill[0])
    before, pads = shape_of(node, 0, value), widths.known
    if pads is None:
        raise NotFollowed("pads by what follows from the data")
    if value.degree is not None:
        others = [end for axis, end in enumerate(pads) if axis != value.axis]
        if any(degree_of(end) != 0 for ends in others for end in ends):
            raise DoesNotSplit("pads by the number of examples")
    sign = -1 if node.type == "MirrorPadGrad" else 1
    shape = tuple(
        None if s is None or UNKNOWN in (a, b) else s + sign * (a + b)
        for s, (a, b) in zip(before, pads, strict=True)
    )
    if value.kind is Kind.SAME:
        return _zeros_around(node, value, shape)
    if value.axis is None or not any(pads[value.axis]):
        return value.with_(shape=shape)
    # Zeros for other blocks of the batch: the gradient of a slice.
    if node.type == "Pad" and not rows_of(value).uniform:
        return _whole(node, value, value.axis, pads[value.axis][0], shape)
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
