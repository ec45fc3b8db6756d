"""Operations that take a part of axes, or put it back among zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.conversions import SIZE, local_shape, static
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Sharded, Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import axes, rule
from keras_towers.partition.rules.reductions import numbers
from keras_towers.partition.sizes import UNKNOWN
from keras_towers.partition.slice_spans import Span, spans

_LINEAR = (frozenset({0}),)


def _labels(taken: Sequence[Span], rank: int) -> tuple[list[Any], list[Any]]:
    """Labels of what is sliced and of the slice: axes that are taken whole."""
    whole: list[Any] = [None] * rank
    left: list[Any] = []
    for span in taken:
        is_whole = span.axis is not None and span.size is None
        if is_whole:
            whole[span.axis or 0] = span.axis
        if not span.dropped:
            left.append(span.axis if is_whole else None)
    return whole, left


def _sizes(taken: Sequence[Span], shape: Sequence[Any]) -> list[Any]:
    """The sizes of what is left, None where they are not known."""
    sizes = []
    for span in taken:
        size: Any = 1
        if span.axis is not None:
            size = shape[span.axis] if span.size is None else span.size
        if not span.dropped:
            sizes.append(None if size is UNKNOWN else size)
    return sizes


def _entries(value: Value) -> Any:
    """What is known of the ends of a slice."""
    if value.known is not None or not value.shape:
        return value.known
    (count,) = value.shape
    return [UNKNOWN] * count if isinstance(count, int) else None


def _strided_spans(
    node: Node, shape: Sequence[Any] | None, ends: Sequence[Value]
) -> list[Span] | None:
    if shape is None:
        return None
    return spans(node, shape, *[_entries(end) for end in ends])


@axes("StridedSlice")
def _strided_axes(node: Node, value: Value, *ends: Value) -> Factors | None:
    taken, rank = _strided_spans(node, value.shape, ends), node.rank(0)
    if taken is None or rank is None:
        return None
    whole, left = _labels(taken, rank)
    return Factors([whole, None, None, None], [left], linear=_LINEAR)


@rule("StridedSlice")
def _strided(
    partition: Partitioner, node: Node, value: Value, *ends: Value
) -> list[Value] | None:
    factors = _strided_axes(node, value, *ends)
    if factors is None:
        return None
    taken = _strided_spans(node, value.shape, ends)
    return _taken(partition, node, value, taken, [value, *ends], factors)


@axes("Slice")
def _slice_axes(
    node: Node, value: Value, begin: Value, size: Value
) -> Factors | None:
    taken, rank = _slice_spans(value, begin, size), node.rank(0)
    if taken is None or rank is None:
        return None
    whole, left = _labels(taken, rank)
    return Factors([whole, None, None], [left], linear=_LINEAR)


def _slice_spans(value: Value, begin: Value, size: Value) -> list[Span] | None:
    if value.shape is None:
        return None
    first, count = _entries(begin), _entries(size)
    if first is None or count is None:
        return None
    found = []
    for axis, whole in enumerate(value.shape):
        own = count[axis]
        if own == -1:
            own = UNKNOWN if whole is None else whole - first[axis]
        is_whole = first[axis] == 0 and own == whole
        found.append(Span(axis) if is_whole else Span(axis, first[axis], own))
    return found


@rule("Slice")
def _slice(
    partition: Partitioner, node: Node, value: Value, begin: Value, size: Value
) -> list[Value] | None:
    factors = _slice_axes(node, value, begin, size)
    if factors is None:
        return None
    taken, layout = _slice_spans(value, begin, size), value.sharded
    if layout is not None and taken and taken[layout.axis].size is None:
        # It names the number of rows that one device has.
        build = partition.builder
        dtype = node.dtype(2)
        every = [int(a == layout.axis) for a in range(len(value.shape or ()))]
        mask = build.constant(every, "bool")
        rest = build.constant([-1] * len(every), dtype)
        factors.given[2] = build.op(
            "SelectV2", [mask, rest, partition.local(size)], (len(every),)
        )
    inputs = [value, begin, size]
    return _taken(partition, node, value, taken, inputs, factors)


@axes("Split", "SplitV")
def _split_axes(node: Node, *inputs: Value) -> Factors | None:
    at = 1 if node.type == "Split" else 0
    along = numbers(inputs[0 if at else 2])
    rank = node.rank(at)
    if along is None or rank is None:
        return None
    labels = [None if a == along[0] % rank else a for a in range(rank)]
    linear = (frozenset({at}),)
    given = [None, labels] if at else [labels, None, None]
    return Factors(given, [labels] * node.num_outputs, linear=linear)


@rule("Split", "SplitV")
def _split(
    partition: Partitioner, node: Node, *inputs: Value
) -> list[Value] | None:
    factors = _split_axes(node, *inputs)
    if factors is None:
        return None
    at = 1 if node.type == "Split" else 0
    value, count = inputs[at], node.num_outputs
    layout, along = value.sharded, numbers(inputs[0 if at else 2]) or [0]
    if layout is None or layout.axis != along[0] % (node.rank(at) or 1):
        return partition.divided(node, list(inputs), factors)
    sizes = [layout.size // count] * count if at else _entries(inputs[1])
    if sizes is None:
        return None
    results, begin = [], 0
    for size in sizes:
        span = Span(layout.axis, begin, size)
        found = _blocks(partition, node, value, layout, span)
        if found is None:
            return None
        results.append(found)
        begin = begin + size
    return results


def _taken(
    partition: Partitioner,
    node: Node,
    value: Value,
    taken: Sequence[Span] | None,
    inputs: Sequence[Value],
    factors: Factors,
) -> list[Value] | None:
    """What is left of a tensor of which a part of each axis is taken."""
    layout = value.sharded
    span = next(
        (s for s in taken or () if layout and s.axis == layout.axis), None
    )
    if layout is None or span is None or span.size is None:
        found = partition.divided(node, inputs, factors)
        for own in found or ():
            own.shape = tuple(_sizes(taken or (), value.shape or ()))
        return found
    others = [s for s in taken or () if s is not span]
    if any(s.size is not None or s.axis is None for s in others):
        return None
    found_ = _blocks(partition, node, value, layout, span)
    return None if found_ is None else [found_]


def _blocks(
    partition: Partitioner,
    node: Node,
    value: Value,
    layout: Sharded,
    span: Span,
) -> Value | None:
    """Some blocks of the rows of a tensor."""
    if span.dropped or span.stride != 1:
        return None
    first = 0 if span.begin == 0 else layout.units_in(span.begin)
    count = layout.units_in(span.size)
    if first is None or not count:
        return None
    if first % layout.rows or count % layout.rows:
        return None
    found = dataclasses.replace(layout, blocks=count // layout.rows)
    build, shape = partition.builder, list(value.shape or ())
    assert value.local is not None
    begin, size = (
        _at(partition, layout, len(shape), number, rest)
        for number, rest in ((first, 0), (count, -1))
    )
    shape[layout.axis] = found.size
    local = build.op(
        "Slice",
        [value.local, begin, size],
        local_shape(static(shape), found),
    )
    return Value(found, local, shape=tuple(shape))


def _at(
    partition: Partitioner, layout: Sharded, rank: int, number: int, rest: int
) -> Tensor:
    """A vector: some rows of each unit along the axis, else a number."""
    build = partition.builder
    if not number:
        return build.constant([0] * rank, SIZE)
    own = partition.times(number, layout.unit.count)
    entries = [
        own if axis == layout.axis else build.constant(rest, SIZE)
        for axis in range(rank)
    ]
    return partition.vector(entries, SIZE)


@rule("StridedSliceGrad", always=True)
def _strided_gradient(
    partition: Partitioner, node: Node, target: Value, *inputs: Value
) -> list[Value] | None:
    *ends, value = inputs
    rank = node.output_rank()
    if target.known is None or rank is None:
        return None
    sizes = [None if s is UNKNOWN else s for s in target.known]
    taken = _strided_spans(node, sizes, ends)
    if taken is None:
        return None
    whole, left = _labels(taken, rank)
    layout = value.sharded
    if layout is None:
        factors = Factors(
            [None, None, None, None, left], [whole], linear=(frozenset({4}),)
        )
        return partition.divided(node, [target, *inputs], factors)
    axis = left[layout.axis]
    if axis is None or sizes[axis] != layout.size:
        return _among_zeros(partition, sizes, value, layout, taken)
    found = layout.along(axis)
    local_target = partition.local_target(target, sizes, found)
    given = [partition.local(end) for end in ends]
    assert value.local is not None
    (local,) = partition.builder.copy(
        node.operation,
        [local_target, *given, value.local],
        [local_shape(static(sizes), found)],
    )
    return [Value(found, local, shape=tuple(sizes))]


def _among_zeros(
    partition: Partitioner,
    sizes: Sequence[Any],
    value: Value,
    layout: Sharded,
    taken: Sequence[Span],
) -> list[Value] | None:
    """Blocks of rows among blocks of zeros."""
    kept = [span for span in taken if not span.dropped]
    span = kept[layout.axis]
    others = [s for s in taken if s is not span]
    if span.axis is None or span.stride != 1:
        return None
    if any(s.size is not None or s.axis is None for s in others):
        return None
    found = _padded(
        partition, value, layout, span.axis, span.begin, sizes[span.axis]
    )
    return None if found is None else [found]


def _padded(
    partition: Partitioner,
    value: Value,
    layout: Sharded,
    axis: int,
    begin: Any,
    size: Any,
) -> Value | None:
    first = 0 if begin == 0 else layout.units_in(begin)
    whole = layout.units_in(size)
    if first is None or not whole or axis != layout.axis:
        return None
    if first % layout.rows or whole % layout.rows:
        return None
    found = dataclasses.replace(layout, blocks=whole // layout.rows)
    build, shape = partition.builder, list(value.shape or ())
    shape[axis] = found.size
    before = _at(partition, layout, len(shape), first, 0)
    behind = _at(partition, layout, len(shape), whole - first - layout.count, 0)
    widths = build.op("Pack", [before, behind], (len(shape), 2), axis=1)
    assert value.local is not None
    local = build.op(
        "Pad", [value.local, widths], local_shape(static(shape), found)
    )
    return Value(found, local, shape=tuple(shape))


@axes("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad_axes(node: Node, value: Value, widths: Value, *fill: Value):
    rank, known = node.rank(0), widths.known
    if rank is None or known is None:
        return None
    labels = [
        axis if all(width == 0 for width in known[axis]) else None
        for axis in range(rank)
    ]
    linear = _LINEAR if not fill else ()
    given = [labels, None, *[None] * len(fill)]
    mirrors = node.type.startswith("Mirror")
    return Factors(given, [labels], linear=linear, needs_rows=mirrors)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(
    partition: Partitioner, node: Node, value: Value, *options: Value
) -> list[Value] | None:
    factors = _pad_axes(node, value, *options)
    known, layout, shape = options[0].known, value.sharded, value.shape
    if factors is None:
        return None
    if node.type == "Pad" and layout is not None and shape is not None:
        ends = known[layout.axis]
        others = [e for a, e in enumerate(known) if a != layout.axis]
        alone = all(width == 0 for pair in others for width in pair)
        if alone and any(width != 0 for width in ends):
            size = shape[layout.axis] + ends[0] + ends[1]
            found = _padded(
                partition, value, layout, layout.axis, ends[0], size
            )
            return None if found is None else [found]
    return partition.divided(node, [value, *options], factors)
