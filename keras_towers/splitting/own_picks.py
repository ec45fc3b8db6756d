"""The gradient of picking entries of each example by its own indices.

``tf.gather(x, indices, batch_dims=1)`` has a gradient that numbers the
examples: it adds up rows of a flat tensor, at the index plus the number of the
example times its number of entries. An index that is one of them stays with its
example, which is certain where the same indices have picked from as many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rounds import source
from keras_towers.splitting.sizes import EXAMPLES, examples_in
from keras_towers.splitting.values import Kind, Rows, Value, examples


def added_up(
    node: Node, given: list[Value], values: Mapping[str, Value]
) -> Value | None:
    """Return what such a gradient is; None: it is none.

    Args:
        node: an operation.
        given: its inputs.
        values: what the tensors of its graph are.
    """
    if node.type != "UnsortedSegmentSum" or node.rank(1) != 1:
        return None
    rows, _, count = given
    entries = _multiple(count)
    places = _flat(node.operation.inputs[1])
    if not entries or rows.rows is None or places.op.type != "AddV2":
        return None
    for number, index in (places.op.inputs, list(places.op.inputs)[::-1]):
        index = source(index)
        picks = values[index.name]
        if picks.rows != Rows(0) or not picks.is_free or not picks.shape:
            continue
        each = picks.shape[1:]
        if not all(isinstance(size, int) for size in each):
            continue
        if rows.rows.place != (0, 1, math.prod(each)) or rows.shape is None:
            continue
        if not _is_number(number, len(picks.shape), entries, values):
            continue
        if not any(
            _picks(t, index, entries, values) for t in index.consumers()
        ):
            continue
        shape = (entries * EXAMPLES, *rows.shape[1:])
        return examples(0, 1, entries, rows.degree, shape=shape)
    return None


def _flat(tensor: Any) -> Any:
    while tensor.op.type in ("Identity", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor


def _multiple(count: Value) -> int | None:
    """How many entries each example has, of so many in all."""
    if count.known is None or count.known.size != 1:
        return None
    return examples_in(count.known.flat[0])


def _is_number(
    tensor: Any, rank: int, entries: int, values: Mapping[str, Value]
) -> bool:
    """Whether it is the number of each example times its entries."""
    tensor = source(tensor)
    if tensor.op.type == "Reshape":
        target = values[tensor.op.inputs[1].name].known
        if target is None or list(target) != [EXAMPLES] + [1] * (rank - 1):
            return False
        tensor = source(tensor.op.inputs[0])
    elif rank != 1:
        return False
    if tensor.op.type != "Mul":
        return False
    for number, times in (tensor.op.inputs, list(tensor.op.inputs)[::-1]):
        number = source(number)
        if number.op.type == "Range" and _known(times, values) == [entries]:
            ends = [_known(end, values) for end in number.op.inputs]
            return ends == [[0], [EXAMPLES], [1]]
    return False


def _known(tensor: Any, values: Mapping[str, Value]) -> list[Any]:
    known = values[tensor.name].known
    return [] if known is None else list(known.flat)


def _picks(
    operation: Any, index: Any, entries: int, values: Mapping[str, Value]
) -> bool:
    """Whether it picks from as many entries of each example."""
    if operation.type == "Identity":
        copy = operation.outputs[0]
        return any(_picks(t, copy, entries, values) for t in copy.consumers())
    if operation.type != "GatherV2" or operation.get_attr("batch_dims") != 1:
        return False
    picked, by, axis = operation.inputs
    shape = values[picked.name].shape if picked.name in values else None
    return bool(
        by is index
        and shape is not None
        and len(shape) > 1
        and shape[1] == entries
        and axis.name in values
        and _known(axis, values) == [1]
        and values[picked.name].kind is Kind.ROWS
    )
