"""Operations that move, join or take apart whole axes."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.partition.factors import ONE, Factors, along
from keras_towers.partition.layouts import Value
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import Node, axes, rule
from keras_towers.partition.rules.reductions import axes_of, numbers


@axes("Transpose", "ConjugateTranspose")
def _transposed(node: Node, value: Value, order: Value) -> Factors | None:
    places = numbers(order)
    if places is None:
        return None
    return Factors([range(value.rank), None], [places], [[0]])


def _with_axis(value: Value, at: int, label: Any) -> list[Any]:
    """The labels of a value's axes, and of a new one among them."""
    labels: list[Any] = list(range(value.rank))
    labels.insert(at % (value.rank + 1), label)
    return labels


@axes("ExpandDims")
def _expanded(node: Node, value: Value, at: Value) -> Factors | None:
    places = numbers(at)
    if places is None:
        return None
    labels = _with_axis(value, places[0], ONE)
    return Factors([range(value.rank), None], [labels], [[0]])


@axes("Pack")
def _packed(node: Node, *values: Value) -> Factors:
    labels, count = range(values[0].rank), len(values)
    output = _with_axis(values[0], node.attr("axis"), None)
    return Factors([labels] * count, [output], [range(count)])


@axes("OneHot")
def _one_hot(node: Node, places: Value, *options: Value) -> Factors:
    output = _with_axis(places, node.attr("axis"), None)
    return Factors([range(places.rank), *[None] * len(options)], [output])


@axes("Squeeze")
def _squeezed(node: Node, value: Value) -> Factors | None:
    gone = {axis % value.rank for axis in node.attr("squeeze_dims")}
    # Without axes, those of size 1 go, which may be the one of a single row.
    return along(gone, [value], 1, [[0]], keeps=False) if gone else None


@axes("Unpack")
def _unpacked(node: Node, value: Value) -> Factors:
    gone = [node.attr("axis") % value.rank]
    return along(gone, [value], node.num_outputs, [[0]], keeps=False)


@axes("ReverseV2", "Roll")
def _reversed(node: Node, *inputs: Value) -> Factors | None:
    gone = axes_of(inputs[-1], inputs[0].rank)
    return None if gone is None else along(gone, inputs, 1, [[0]])


@axes("ReverseSequence")
def _reversed_sequence(node: Node, value: Value, lengths: Value) -> Factors:
    seq_dim, batch_dim = node.attr("seq_dim"), node.attr("batch_dim")
    labels = [None if a == seq_dim else a for a in range(value.rank)]
    return Factors([labels, [batch_dim]], [labels], [[0]])


@axes("ConcatV2")
def _joined_axes(node: Node, *values: Value) -> Factors | None:
    gone, count = axes_of(values[-1], values[0].rank), len(values) - 1
    if not gone:
        return None
    labels = [None if a in gone else a for a in range(values[0].rank)]
    return Factors([*[labels] * count, None], [labels], [range(count)])


@rule("ConcatV2")
def _joined(
    partition: Partitioner, node: Node, *values: Value
) -> list[Value] | None:
    """Rows of several tensors, one after the other, are blocks of rows."""
    *parts, over = values
    layouts = [part.sharded for part in parts]
    given = [part.local for part in parts if part.local is not None]
    first, shape = layouts[0], list(parts[0].shape or ())
    if first is None or axes_of(over, len(shape)) != [first.axis]:
        return None
    blocks = 0
    for layout in layouts:
        if (
            layout is None
            or dataclasses.replace(layout, blocks=first.blocks) != first
        ):
            return None
        blocks += layout.blocks
    joined = dataclasses.replace(first, blocks=blocks)
    shape[joined.axis] = joined.size
    given.append(partition.local(over))
    return partition.on_towers(node, given, joined, shapes=[shape])
