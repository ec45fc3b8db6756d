"""Places that are put elsewhere, and operations on places."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.partition.slices import spans
from keras_towers.splitting.completing import completed
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.places.meanings import (
    RULES,
    Below,
    Columns,
    Ends,
    Filled,
    Place,
    Step,
    behind,
    numbered,
    reshaped,
    stand_in,
)
from keras_towers.splitting.values import Kind, Value, examples

if TYPE_CHECKING:
    from keras_towers.splitting.interpreter import Interpreter


# They put entries of their first input elsewhere, or take some; as does Split.
_MOVING = (
    *("Identity", "Snapshot", "StopGradient", "Reshape", "ExpandDims"),
    *("Squeeze", "Tile", "BroadcastTo", "StridedSlice", "Slice", "Transpose"),
    *("Unpack", "GatherV2", "SplitV", "DynamicPartition"),
)
_KEEPS = ("Identity", "Snapshot", "StopGradient", "Cast")


def followed(
    interpreter: Interpreter,
    node: Node,
    given: Sequence[Value],
    values: Mapping[str, Value],
) -> Sequence[Value] | None:
    """Return what an operation on places returns; None: it is not on such."""
    step = Step(interpreter, node, values)
    at = 0 if node.type in _MOVING else 1 if node.type == "Split" else None
    if node.type in _KEEPS and given and given[0].meaning is not None:
        if not _is_kept(node):
            return None
        if given[0].kind is Kind.OTHER:
            return [given[0]]
        at = 0
    if at is not None and given[at].meaning is not None:
        moved = _moved(step, given, at)
        if moved is not None:
            return moved
    for special in RULES.get(node.type, ()):
        found = special(step, *given)
        if found is not None:
            return [found] if isinstance(found, Value) else found
    return None


def _is_kept(node: Node) -> bool:
    return node.type != "Cast" or all(
        dtype.is_integer and dtype.size >= 4
        for dtype in (node.dtype(0), node.output_dtype(0))
    )


def _moved(
    step: Step, given: Sequence[Value], at: int
) -> Sequence[Value] | None:
    """What numbers are that are put elsewhere: the same numbers."""
    meaning, node = given[at].meaning, step.node
    if isinstance(meaning, Columns):
        return _of_columns(step, given[at], *given[at + 1 :])
    if isinstance(meaning, Ends):
        return None
    if isinstance(meaning, Filled) and node.type == "GatherV2":
        if not _are_filled(step):
            return None
        meaning = Place(meaning.rows, meaning.unit)
    plain = list(given)
    plain[at] = stand_in(given[at])
    if plain[at] is given[at]:
        if given[at].known is not None:
            return None
        plain[at] = dataclasses.replace(given[at], meaning=None)
    found = step.interpreter.applied(node, plain, step.values)
    results = []
    for index, value in enumerate(found):
        value = completed(node, index, value, plain)
        if value.kind is Kind.OTHER:
            results.append(value)
        elif not isinstance(meaning, Place | Filled):
            kept = meaning if _keeps(meaning, given[at], value) else None
            results.append(dataclasses.replace(value, meaning=kept))
        elif value.rows is None:
            return None
        else:
            place = dataclasses.replace(meaning, rows=value.rows)
            results.append(numbered(place, value.shape))
    return results


def _are_filled(step: Step) -> bool:
    """Whether what is picked is what a mask leaves that drops all -1."""
    mask = behind(step.tensor(1), "Squeeze", "Where")
    mask = mask and behind(reshaped(mask.inputs[0]), "NotEqual")
    if not mask or step.known(mask.inputs[1]) != [-1]:
        return False
    return reshaped(mask.inputs[0]) is reshaped(step.tensor(0))


def _keeps(meaning: Any, before: Value, after: Value) -> bool:
    """Whether numbers that were moved still mean the same."""
    if isinstance(meaning, Below):
        return True
    return (before.rows, before.shape) == (after.rows, after.shape)


def _of_columns(
    step: Step, value: Value, *ends: Value
) -> Sequence[Value] | None:
    """One of several columns that places along several axes consist of."""
    columns, shape = value.meaning, value.shape
    if step.node.type == "ExpandDims" and shape is not None:
        at = step.known(step.tensor(1))
        if at not in ([k] for k in range(len(shape))):
            return None
        rows = columns.rows.at(columns.rows.axis + (at[0] <= columns.rows.axis))
        shape = (*shape[: at[0]], 1, *shape[at[0] :])
        return [numbered(Columns(rows, columns.items), shape)]
    if step.node.type != "StridedSlice" or shape is None or len(shape) != 2:
        return None
    taken = spans(step.node, shape, *(end.known for end in ends))
    if taken is None:
        return None
    first, last = taken[:2]
    whole = first.axis == 0 and first.size is None and not first.dropped
    if not whole or last.axis != 1 or not last.dropped:
        return None
    item = columns.items[int(last.begin) % len(columns.items)]
    if isinstance(item, Place):
        return [numbered(item, shape[:1])]
    return [examples(columns.rows, 0, shape=shape[:1], meaning=item)]


def bounded(
    node: Node, given: Sequence[Value], outputs: list[Value]
) -> list[Value]:
    """Add limits of indices to what an operation returns."""
    at = {"TopKV2": 1, "ArgMax": 0, "ArgMin": 0}.get(node.type)
    if at is None or outputs[at].kind is Kind.OTHER or given[0].shape is None:
        return outputs
    axis = -1
    if node.type != "TopKV2":
        known = given[1].known
        axis = len(given[0].shape) if known is None else int(known.flat[0])
    if not -len(given[0].shape) <= axis < len(given[0].shape):
        return outputs
    size = given[0].shape[axis]
    if isinstance(size, int):
        outputs[at] = dataclasses.replace(outputs[at], meaning=Below(size))
    return outputs
