"""Operations that move, join or take apart whole axes."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.partition.conversions import local_shape, static
from keras_towers.partition.factors import ONE, Factors
from keras_towers.partition.layouts import Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import axes, rule
from keras_towers.partition.rules.reductions import axes_of, numbers

_LINEAR = (frozenset({0}),)


@axes("Transpose", "ConjugateTranspose")
def _transposed(node: Node, value: Value, order: Value) -> Factors | None:
    places, rank = numbers(order), node.rank(0)
    if places is None or rank is None:
        return None
    return Factors([range(rank), None], [places], linear=_LINEAR)


@axes("ExpandDims")
def _expanded(node: Node, value: Value, at: Value) -> Factors | None:
    places, rank = numbers(at), node.rank(0)
    if places is None or rank is None:
        return None
    place = places[0] % (rank + 1)
    labels: list[Any] = list(range(rank))
    labels.insert(place, ONE)
    return Factors([range(rank), None], [labels], linear=_LINEAR)


@axes("Squeeze")
def _squeezed(node: Node, value: Value) -> Factors | None:
    rank, gone = node.rank(0), node.attr("squeeze_dims")
    # Without axes, those of size 1 go, which may be the one of a single row.
    if rank is None or not gone:
        return None
    gone = {axis % rank for axis in gone}
    labels = [None if axis in gone else axis for axis in range(rank)]
    left = [axis for axis in range(rank) if axis not in gone]
    return Factors([labels], [left], linear=_LINEAR)


@axes("ReverseV2", "Roll")
def _reversed(node: Node, value: Value, *options: Value) -> Factors | None:
    found, rank = axes_of(node, options[-1]), node.rank(0)
    if found is None or rank is None:
        return None
    labels = [None if axis in found else axis for axis in range(rank)]
    others = [None] * len(options)
    return Factors([labels, *others], [labels], linear=_LINEAR)


@axes("ReverseSequence")
def _reversed_each(node: Node, value: Value, lengths: Value) -> Factors | None:
    rank, along = node.rank(0), node.attr("seq_dim")
    if rank is None:
        return None
    labels = [None if axis == along else axis for axis in range(rank)]
    return Factors(
        [labels, (node.attr("batch_dim"),)], [labels], linear=_LINEAR
    )


@axes("Pack")
def _packed(node: Node, *values: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    labels: list[Any] = list(range(rank))
    labels.insert(node.attr("axis") % (rank + 1), None)
    linear = (frozenset(range(len(values))),)
    return Factors([range(rank)] * len(values), [labels], linear=linear)


@axes("Unpack")
def _unpacked(node: Node, value: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    gone = node.attr("axis") % rank
    labels = [None if axis == gone else axis for axis in range(rank)]
    left = [axis for axis in range(rank) if axis != gone]
    return Factors([labels], [left] * node.num_outputs, linear=_LINEAR)


@axes("ConcatV2")
def _joined_axes(node: Node, *values: Value) -> Factors | None:
    found, rank = numbers(values[-1]), node.rank(0)
    if found is None or not rank:
        return None
    at = found[0] % rank
    labels = [None if axis == at else axis for axis in range(rank)]
    count = len(values) - 1
    linear = (frozenset(range(count)),)
    return Factors([*[labels] * count, None], [labels], linear=linear)


@rule("ConcatV2")
def _joined(
    partition: Partitioner, node: Node, *values: Value
) -> list[Value] | None:
    factors, (*parts, along) = _joined_axes(node, *values), values
    if factors is None:
        return None
    at = (numbers(along) or [0])[0] % (node.rank(0) or 1)
    layouts = [part.sharded for part in parts]
    first = layouts[0]
    # Rows of several tensors, one after the other, are blocks of rows.
    if first is not None and all(
        own is not None
        and own.axis == at
        and (own.unit, own.rows) == (first.unit, first.rows)
        for own in layouts
    ):
        blocks = sum(own.blocks for own in layouts if own is not None)
        layout = dataclasses.replace(first, blocks=blocks)
        sizes = list(parts[0].shape or ())
        sizes[at] = layout.size
        given = [part.local for part in parts if part.local is not None]
        (local,) = partition.builder.copy(
            node.operation,
            [*given, partition.local(along)],
            [local_shape(static(sizes), layout)],
        )
        return [Value(layout, local, shape=tuple(sizes))]
    return partition.divided(node, values, factors)


@axes("OneHot")
def _one_hot(node: Node, places: Value, *rest: Value) -> Factors | None:
    rank = node.rank(0)
    if rank is None:
        return None
    labels: list[Any] = list(range(rank))
    labels.insert(node.attr("axis") % (rank + 1), None)
    return Factors([range(rank), *[None] * len(rest)], [labels])
