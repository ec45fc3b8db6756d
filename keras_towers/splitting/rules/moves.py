"""Operations that put entries elsewhere, or repeat them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    added,
    aligned,
    all_outputs,
    axes_of,
    dropped,
    fixed,
    free,
    inserted,
    multiple,
    rank_of,
    refuse_sums,
    replaced,
    rows_of,
    rule,
    shape_of,
    spread,
)
from keras_towers.splitting.sizes import (
    UNKNOWN,
    Size,
    degree_of,
    examples_in,
)
from keras_towers.splitting.slices import Span, spans
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Shape,
    Value,
    common,
    examples,
    same,
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
    grown = [axis for axis, size in enumerate(shape) if examples_in(size)]
    if len(grown) != 1:
        raise NotFollowed(
            "reshapes so that the rows of examples cannot be followed"
        )
    axis = grown[0]
    count = multiple(shape[axis])
    ahead, ahead_now = _entries(before[: rows.axis]), _entries(shape[:axis])
    if rows.uniform and count == rows.count and ahead == ahead_now:
        return value.moved(axis, shape=shape)
    if rows.draw is not None:
        outer = _outer_of_draw(node, rows, ahead, ahead_now, count)
        node.layouts.use(rows, outer, rows.count // outer)
        rows = Rows(rows.axis, outer, rows.count // outer)
    blocks = ahead * rows.outer
    if blocks % ahead_now or count % (blocks // ahead_now):
        raise DoesNotSplit(
            "reshapes so that a row holds parts of several examples"
        )
    outer = blocks // ahead_now
    if rows.uniform:
        # Entries are alike along this axis only.
        if ahead != ahead_now or count != rows.count:
            rows = Rows(rows.axis, rows.outer, rows.inner)
        else:
            return value.moved(axis, shape=shape)
    return examples(axis, outer, count // outer, value.degree, shape=shape)


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
        return result.with_(rows=Rows(*result.rows.place), shape=shape)
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
    return examples(
        rows.axis, outer, inner, value.degree, uniform=rows.uniform, shape=shape
    )


@rule("BroadcastTo")
def _broadcast(node: Node, value: Value, target: Value) -> Value:
    shape = _known_shape(node, target)
    if value.kind is not Kind.ROWS:
        return spread(node, value, shape)
    rank = len(shape) if shape is not None else node.output_rank()
    if rank is None:
        raise NotFollowed("makes a tensor of unknown rank")
    rows = rows_of(value)
    grown = [a for a, s in enumerate(shape or ()) if examples_in(s)]
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


@rule("ZerosLike", "OnesLike")
def _filled_like(node: Node, value: Value) -> Value:
    degree = None if node.type == "ZerosLike" else 0
    shape = value.shape
    if value.kind is Kind.ROWS:
        rows = rows_of(value)
        return examples(
            rows.axis, 1, rows.count, degree, uniform=True, shape=shape
        )
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


@rule("Pack")
def _packed(node: Node, *values: Value) -> Value:
    rank = rank_of(node, 0, values[0])
    result = added(node, values, "joins", [rank] * len(values))
    return inserted(result, node.attr("axis") % (rank + 1), len(values))


@rule("Unpack")
def _unpacked(node: Node, value: Value) -> list[Value]:
    axis = node.attr("axis") % rank_of(node, 0, value)
    if value.kind is Kind.ROWS and rows_of(value).axis == axis:
        raise DoesNotSplit("takes the examples of the batch apart")
    return all_outputs(node, dropped(value, [axis]))


@rule("ConcatV2")
def _joined(node: Node, *values: Value) -> Value:
    *parts, along = values
    rank = rank_of(node, 0, parts[0])
    axis = int(fixed(along)) % rank
    size: Any = 0
    for part in parts:
        own = None if part.shape is None else part.shape[axis]
        size = None if size is None or own is None else size + own
    ranks = [rank] * len(parts)
    shapes = [
        p.with_(shape=replaced(p.shape, axis, 1), rows=p.rows) for p in parts
    ]
    along_axis = [
        p for p in parts if p.rows is not None and p.rows.axis == axis
    ]
    if not along_axis or any(
        p.kind is Kind.SUM and p.degree is not None for p in parts
    ):
        result = added(node, shapes, "joins", ranks)
        return result.with_(shape=replaced(result.shape, axis, size))
    degree = common((p.degree for p in parts), "joins")
    if len(along_axis) < len(parts):
        raise DoesNotSplit("joins examples with rows that are no examples")
    place = [rows_of(p) for p in parts]
    if all(rows.uniform for rows in place):
        place = [Rows(r.axis, 1, r.inner) for r in place]
    place = [node.layouts.resolved(rows) for rows in place]
    inner = {rows.inner for rows in place if not rows.uniform}
    if len(inner) != 1:
        raise DoesNotSplit("joins the rows of examples in different orders")
    (each,) = inner
    if any(rows.count % each for rows in place):
        raise DoesNotSplit("joins the rows of examples in different orders")
    outer = sum(rows.count // each for rows in place)
    shape = replaced(along_axis[0].shape, axis, size)
    return examples(axis, outer, each, degree, shape=shape)


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
    count = examples_in(size)
    first = 0 if begin == 0 else examples_in(begin)
    if count is None or first is None:
        raise DoesNotSplit("takes some of the examples of the batch")
    if rows.uniform:
        return examples(axis, 1, count, value.degree, uniform=True)
    if first % rows.inner or count % rows.inner:
        raise DoesNotSplit("takes some of the examples of the batch")
    if first == 0 and count == rows.count:
        return value.moved(axis)
    return examples(axis, count // rows.inner, rows.inner, value.degree)


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
    if span.stride != 1:
        raise DoesNotSplit("takes every other row of the batch, or reverses it")
    if rows_of(value).draw is not None:
        value = value.with_(rows=node.layouts.resolved(rows_of(value)))
    return _part(value, axis, span.begin, span.size)


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
    if value.kind is not Kind.ROWS:
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
                raise DoesNotSplit(
                    "takes every other row of the batch, or reverses it"
                )
            return _whole(node, value, span.axis, span.begin, shape)
        axis += not span.dropped
    raise NotFollowed("takes a slice that cannot be followed")


def _zeros_around(node: Node, value: Value, shape: Shape) -> Value:
    """What is no example, among zeros, which may be rows of examples."""
    if any(isinstance(s, Size) and s.power("n") for s in shape):
        if value.degree is None:
            return spread(node, same(None), shape)
        raise DoesNotSplit("puts what is no example into a row of the batch")
    return value.with_(shape=shape)


def _whole(
    node: Node, value: Value, axis: int, begin: Any, shape: Shape
) -> Value:
    """Blocks of rows among blocks of zeros: the gradient of a part."""
    rows = node.layouts.resolved(rows_of(value))
    first = 0 if begin == 0 else examples_in(begin)
    count = multiple(shape[axis])
    if first is None or first % rows.inner or count % rows.inner:
        raise DoesNotSplit("takes some of the examples of the batch")
    outer = count // rows.inner
    return examples(axis, outer, rows.inner, value.degree, shape=shape)


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
