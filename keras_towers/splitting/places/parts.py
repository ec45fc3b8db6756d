"""What a mask leaves of examples, and rows of different lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.partition.sizes import (
    EXAMPLES,
)
from keras_towers.splitting.places.meanings import (
    Below,
    Columns,
    Ends,
    Filled,
    Lengths,
    Place,
    Step,
    behind,
    numbered,
    reshaped,
    rule,
    stand_in,
)
from keras_towers.splitting.places.picks import has_rows, shape_of_picked
from keras_towers.splitting.rounds import source
from keras_towers.splitting.rules.common import (
    one_order,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Rows,
    Value,
    common,
    examples,
)


@rule("GatherV2")
def _repeated(
    step: Step, values: Value, places: Value, axis: Value
) -> Value | None:
    """What ``tf.repeat`` repeats, as often as its example says.

    It repeats as often as the most, and drops what is too much by a mask.
    """
    tiled = behind(step.tensor(0), "Reshape", "Tile")
    less = behind(step.tensor(1), "Squeeze", "Where", "Reshape", "Less")
    if tiled is None or less is None or step.known(step.tensor(2)) != [0]:
        return None
    whole = behind(tiled.outputs[0], "Tile", "ExpandDims")
    times = behind(tiled.inputs[1], "Pack")
    numbers = behind(less.inputs[0], "Range")
    lengths = less.inputs[1]
    if lengths.op.type == "Cast":
        lengths = lengths.op.inputs[0]
    column = behind(lengths, "ExpandDims")
    if None in (whole, times, numbers, column):
        return None
    lengths, longest = source(column.inputs[0]), source(numbers.inputs[1])
    most = behind(longest, "Maximum")
    axes = [step.known(o.inputs[1]) for o in (whole, column)]
    ones = [step.known(t) for k, t in enumerate(times.inputs) if k != 1]
    limits = [step.known(t) for t in (numbers.inputs[0], numbers.inputs[2])]
    if axes not in ([[1], [-1]], [[1], [1]]) or limits != [[0], [1]]:
        return None
    if any(one != [1] for one in ones) or most is None:
        return None
    largest = behind(most.inputs[1], "Max")
    if largest is None or source(largest.inputs[0]) is not lengths:
        return None
    if source(times.inputs[1]) is not longest:
        return None
    given = step.values[whole.inputs[0].name]
    often = step.values[lengths.name]
    plain = stand_in(given)
    if plain.rows is None or often.rows is None or plain.shape is None:
        return None
    if plain.axis != 0 or often.axis != 0 or not often.is_free:
        return None
    if one_order(step.node, [plain.rows, often.rows]).outer != 1:
        return None
    meaning = often.meaning
    unit = (
        meaning.unit
        if isinstance(meaning, Lengths)
        else step.interpreter.unit("repeat", reshaped(lengths))
    )
    shape = (unit, *plain.shape[1:])
    found = Rows(0, unit=unit)
    if isinstance(given.meaning, Place):
        place = dataclasses.replace(given.meaning, rows=found)
        return numbered(place, shape)
    return examples(found, plain.degree, shape=shape)


@rule("RaggedTensorToTensor")
def _dense(
    step: Step, target: Value, values: Value, fill: Value, *parts: Value
) -> Value | None:
    """Ragged rows that are filled up to a size that is known."""
    plain = stand_in(values)
    meaning = parts[0].meaning
    if step.node.attr("row_partition_types") != [b"ROW_SPLITS"]:
        return None
    if not isinstance(meaning, Ends) or meaning.part != "all":
        return None
    if (
        target.known is None
        or values.shape is None
        or fill.kind is not Kind.SAME
    ):
        return None
    count, width = [*target.known.flat, -1][:2]
    if count not in (-1, EXAMPLES):
        return None
    if not isinstance(width, int) or width < 0:
        raise DoesNotSplit("fills rows up to the longest of the batch")
    if not has_rows(plain, Rows(0, unit=meaning.unit), step):
        return None
    degree = common((plain.degree, fill.degree), "joins")
    shape = (EXAMPLES, width, *values.shape[1:])
    place = values.meaning
    if isinstance(place, Place):
        filled = fill.known is not None and fill.known.flat[0] == -1
        if not filled or place.times != 1:
            return None
        return numbered(Filled(Rows(0), place.unit), shape)
    return examples(Rows(0), degree, shape=shape)


@rule("Where")
def _where(step: Step, mask: Value) -> Value | None:
    """Where something is true, example by example."""
    rows = mask.rows
    if mask.kind is not Kind.ROWS or rows is None or mask.shape is None:
        return None
    if (rows.axis, rows.outer) != (0, 1) or not mask.is_free:
        return None
    rows = step.node.layouts.resolved(rows)
    if rows.outer != 1:
        return None
    unit = step.interpreter.unit("where", reshaped(step.tensor(0)))
    found = Rows(0, unit=unit)
    others = [
        Below(size) if isinstance(size, int) and size > 0 else None
        for size in mask.shape[1:]
    ]
    place = Place(found, rows.unit, rows.inner)
    if not others:
        return numbered(place, (unit, 1))
    return numbered(Columns(found, (place, *others)), (unit, len(mask.shape)))


@rule("DynamicPartition")
def _parted(step: Step, values: Value, parts: Value) -> list[Value] | None:
    """Each example is put into one of several parts, in order."""
    if values.rows is None or parts.rows is None or not parts.is_free:
        return None
    if values.axis != 0 or parts.axis != 0 or len(parts.shape or ()) != 1:
        return None
    rows = one_order(step.node, [values.rows, parts.rows])
    if rows.outer != 1 or values.shape is None:
        return None
    if rows.draw is not None:
        step.node.layouts.use(rows, 1, rows.count)
    results = []
    for index in range(step.node.num_outputs):
        tensor = reshaped(step.tensor(1))
        unit = step.interpreter.unit(f"part {index}", tensor)
        results.append(
            examples(
                Rows(0, unit=unit),
                values.degree,
                shape=(unit, *values.shape[1:]),
            )
        )
    return results


@rule("DynamicStitch", "ParallelDynamicStitch")
def _stitched(step: Step, *values: Value) -> Value | None:
    """What was parted is joined by the parts of all places."""
    half = len(values) // 2
    tensors = [source(step.tensor(index)) for index in range(half)]
    parting = tensors[0].op
    if parting.type != "DynamicPartition":
        return None
    if [id(t) for t in tensors] != [id(t) for t in parting.outputs]:
        return None
    places, parts = values[:half], values[half:]
    whole = step.values[parting.inputs[0].name].meaning
    if not isinstance(whole, Place) or not _is_all(step, parting.inputs[0]):
        return None
    for place, part in zip(places, parts, strict=True):
        if not isinstance(place.meaning, Place):
            return None
        if not has_rows(part, place.meaning.rows, step):
            return None
    degree = common((part.degree for part in parts), "joins")
    shape = shape_of_picked(parts[0], whole)
    return examples(whole.picked, degree, shape=shape)


def _is_all(step: Step, tensor: Any) -> bool:
    """Whether places are those of all entries, each once."""
    tensor = reshaped(tensor)
    place = step.values[tensor.name].meaning
    whole = isinstance(place, Place) and place.rows.count == place.times
    return whole and tensor.op.type == "Range"
