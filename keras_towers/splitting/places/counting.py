"""Arithmetic of places, and where they come from."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.partition.sizes import (
    EXAMPLES,
    units_in,
)
from keras_towers.splitting.places.meanings import (
    Below,
    Columns,
    Ends,
    Filled,
    Lengths,
    Place,
    Step,
    numbered,
    rule,
    stand_in,
)
from keras_towers.splitting.rounds import source
from keras_towers.splitting.rules.common import (
    aligned,
    rank_of,
)
from keras_towers.splitting.values import (
    Kind,
    Rows,
    Value,
    examples,
    of_known,
)


@rule("Range")
def _range(step: Step, *ends: Value) -> Value | None:
    start, end, delta = (
        step.known(tensor) for tensor in step.node.operation.inputs
    )
    if start != [0] or not end or len(delta) != 1:
        return None
    found, each = units_in(end[0]), delta[0]
    if found is None or not isinstance(each, int) or each < 1:
        return None
    unit, count = found
    if count % each:
        return None
    place = Place(Rows(0, 1, count // each, unit=unit), unit, count, each)
    size = count // each * (EXAMPLES if unit is None else unit)
    return numbered(place, (size,))


@rule("Shape")
def _count_of_ends(step: Step, value: Value) -> Value | None:
    if not isinstance(value.meaning, Ends) or value.shape is None:
        return None
    return of_known(list(value.shape))


@rule("StridedSlice")
def _part_of_ends(step: Step, value: Value, *ends: Value) -> Value | None:
    """All ends but the first, or all but the last."""
    meaning, node = value.meaning, step.node
    if not isinstance(meaning, Ends) or meaning.part != "all":
        return None
    others = ("shrink_axis", "new_axis", "ellipsis")
    if any(node.attr(f"{name}_mask") for name in others):
        return None
    first, last, stride = (step.known(t) for t in node.operation.inputs[1:])
    opened = node.attr("begin_mask"), node.attr("end_mask")
    if stride != [1]:
        return None
    part = None
    if opened == (0, 1) and first == [1]:
        part = "end"
    elif opened[1] == 0 and last == [-1] and (opened[0] or first == [0]):
        part = "begin"
    if part is None:
        return None
    return numbered(Ends(meaning.unit, part), (EXAMPLES,))


@rule("Sub")
def _difference(step: Step, a: Value, b: Value) -> Value | None:
    """The length of ragged rows, or how far two entries are apart."""
    one, two = a.meaning, b.meaning
    if isinstance(one, Ends) and isinstance(two, Ends):
        if (one.part, two.part) != ("end", "begin") or one.unit != two.unit:
            return None
        return examples(shape=(EXAMPLES,), meaning=Lengths(one.unit))
    return _own_parts(step, a, b)


@rule("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")
def _own_parts(step: Step, a: Value, b: Value) -> Value | None:
    """Places in one example differ by what their own parts do."""
    one, two = a.meaning, b.meaning
    alike = False
    if isinstance(one, Place) and isinstance(two, Place):
        alike = (one.unit, one.times) == (two.unit, two.times)
    elif step.node.type == "NotEqual" and isinstance(one, Filled):
        alike = b.known is not None and list(b.known.flat) == [-1]
    elif step.node.type == "GreaterEqual" and isinstance(one, Place):
        alike = b.kind is Kind.SAME and b.degree is None
    if not alike:
        return None
    return aligned(step.node, [stand_in(a), stand_in(b)], 0)


@rule("SelectV2")
def _of_the_only_one(
    step: Step, chosen: Value, numbers: Value, zero: Value
) -> Value | None:
    """Numbers, or 0 where there is one example: how maps are vectorized."""
    place, asking = numbers.meaning, source(step.tensor(0)).op
    if not isinstance(place, Place) or asking.type != "Greater":
        return None
    if [step.known(t) for t in asking.inputs] != [[EXAMPLES], [1]]:
        return None
    alone = place.picked == place.rows == Rows(0)
    ends = zero.known is not None and list(zero.known.flat) == [0]
    return numbered(place, numbers.shape) if alone and ends else None


@rule("Maximum")
def _not_negative(step: Step, a: Value, b: Value) -> Value | None:
    for value, zero in ((a, b), (b, a)):
        counts = zero.kind in (Kind.SAME, Kind.ROWS) and zero.degree is None
        if counts and isinstance(value.meaning, Place):
            return _with_rows(step, value, zero)
    return None


def _with_rows(step: Step, value: Value, more: Value, **changes: Any) -> Value:
    """A place that is combined with something else of its example."""
    ranks = [rank_of(step.node, 0, value), rank_of(step.node, 1, more)]
    whole = aligned(step.node, [stand_in(value), more], 0, ranks)
    place = dataclasses.replace(value.meaning, rows=whole.rows, **changes)
    return numbered(place, whole.shape)


@rule("Mul")
def _scaled(step: Step, a: Value, b: Value) -> Value | None:
    for value, factor in ((a, b), (b, a)):
        known = factor.known
        if not isinstance(value.meaning, Place) or known is None:
            continue
        if known.size == 1 and isinstance(known.flat[0], int):
            by = known.flat[0]
            times, grain = value.meaning.times, value.meaning.grain
            if by >= 1:
                return _with_rows(
                    step, value, factor, times=times * by, grain=grain * by
                )
    return None


@rule("Mul")
def _first_column(step: Step, value: Value, factor: Value) -> Value | None:
    """A column of numbers times (1, 0, ..., 0), as indices of their rows."""
    known, shape = factor.known, value.shape
    if not isinstance(value.meaning, Place) or known is None or shape is None:
        return None
    if known.ndim != 1 or list(known) != [1] + [0] * (known.size - 1):
        return None
    if len(shape) < 2 or shape[-1] != 1 or known.size < 2:
        return None
    zeros = (Below(1),) * (known.size - 1)
    columns = Columns(value.meaning.rows, (value.meaning, *zeros))
    return numbered(columns, (*shape[:-1], known.size))


@rule("AddV2", "Add")
def _other_columns(step: Step, a: Value, b: Value) -> Value | None:
    """Indices whose first column has been added to nothing but zero."""
    for at, value, rest in ((1, a, b), (0, b, a)):
        columns = value.meaning
        if not isinstance(columns, Columns) or not rest.is_free:
            continue
        if rest.kind not in (Kind.SAME, Kind.ROWS) or rest.shape is None:
            continue
        first = _repeated_constant(step, step.tensor(at))
        if first is None or first.shape[-1:] != rest.shape[-1:]:
            continue
        whole = aligned(step.node, [stand_in(a), stand_in(b)], 0)
        if any(first[..., 0].flat) or whole.rows is None or not whole.shape:
            continue
        if any(isinstance(item, Place) for item in columns.items[1:]):
            continue
        items = (columns.items[0], *(None for _ in columns.items[1:]))
        return numbered(Columns(whole.rows, items), whole.shape)
    return None


def _repeated_constant(step: Step, tensor: Any) -> Any:
    """The known entries that a tensor repeats, or None."""
    while step.values[tensor.name].known is None:
        if tensor.op.type not in ("Identity", "Tile", "BroadcastTo"):
            return None
        tensor = tensor.op.inputs[0]
    known = step.values[tensor.name].known
    return (
        known
        if known.ndim and all(isinstance(e, int) for e in known.flat)
        else None
    )


@rule("FloorDiv", "FloorMod")
def _divided(step: Step, value: Value, by: Value) -> Value | None:
    meaning = value.meaning
    if not isinstance(meaning, Place) or by.known is None or by.known.size > 1:
        return None
    size = by.known.flat[0]
    if not isinstance(size, int) or size < 1 or meaning.times % size:
        return None
    if step.node.type == "FloorMod":
        rest = aligned(step.node, [stand_in(value), by], 0)
        return dataclasses.replace(rest, meaning=Below(size))
    grain = 1 if meaning.grain % size else meaning.grain // size
    times = meaning.times // size
    return _with_rows(step, value, by, times=times, grain=grain)


@rule("AddV2", "Add")
def _added(step: Step, a: Value, b: Value) -> Value | None:
    for at, value, rest in ((1, a, b), (0, b, a)):
        if not isinstance(value.meaning, Place) or not rest.is_free:
            continue
        if rest.kind not in (Kind.SAME, Kind.ROWS):
            continue
        if rest.degree is None:
            return _with_rows(step, value, rest)
        if _is_below(step, rest, step.tensor(at), value.meaning.grain):
            return _with_rows(step, value, rest, grain=1)
    return None


def _is_below(step: Step, rest: Value, tensor: Any, limit: int) -> bool:
    """Whether numbers are at least 0 and less than a limit."""
    if rest.known is not None:
        entries = list(rest.known.flat)
        return all(isinstance(e, int) and 0 <= e < limit for e in entries)
    if isinstance(rest.meaning, Below):
        return rest.meaning.limit <= limit
    while tensor.op.type in ("Identity", "Reshape", "ExpandDims"):
        if _has_picked(step, tensor, limit):
            return True
        tensor = tensor.op.inputs[0]
    return _has_picked(step, tensor, limit)


def _has_picked(step: Step, index: Any, limit: int) -> bool:
    """Whether an index has picked from no more entries of each example."""
    for operation in index.consumers():
        same = operation.type == "Identity" and operation.outputs[0]
        if same is not False and _has_picked(step, same, limit):
            return True
        if operation.type != "GatherV2" or operation.inputs[1] is not index:
            continue
        picked = step.values.get(operation.inputs[0].name)
        shape = None if picked is None else picked.shape
        if (
            operation.get_attr("batch_dims") == 1
            and shape is not None
            and step.known(operation.inputs[2]) == [1]
            and isinstance(shape[1], int)
            and shape[1] <= limit
        ):
            return True
    return False
