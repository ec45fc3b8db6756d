"""Entries of examples that are picked and added up by their places."""

from __future__ import annotations

from typing import Any

from keras_towers.partition.sizes import (
    EXAMPLES,
)
from keras_towers.splitting.places.meanings import (
    Columns,
    Place,
    Step,
    numbered,
    rule,
    stand_in,
)
from keras_towers.splitting.rules.common import (
    aligned,
    free,
)
from keras_towers.splitting.values import (
    Kind,
    Rows,
    Value,
    examples,
)


def has_rows(value: Value, rows: Rows, step: Step) -> bool:
    """Whether a tensor has such rows, in this order."""
    own = value.rows
    if value.kind is not Kind.ROWS or own is None or own.unit != rows.unit:
        return False
    if (own.axis, own.count) != (rows.axis, rows.count):
        return False
    if own.uniform:
        return True
    if own.draw is not None:
        step.node.layouts.use(own, rows.outer, rows.inner)
        return True
    return own.place == rows.place


def shape_of_picked(value: Value, place: Place) -> Any:
    """The number of what places count, and the sizes of one of them."""
    unit = EXAMPLES if place.unit is None else place.unit
    return (place.times * unit, *(value.shape or (None,))[1:])


@rule("GatherV2")
def _picked(
    step: Step, values: Value, places: Value, axis: Value
) -> Value | None:
    if step.node.attr("batch_dims"):
        return None
    along = step.known(step.tensor(2))
    place = places.meaning
    if not isinstance(place, Place) or len(along) != 1:
        return None
    if values.shape is None or places.shape is None:
        return None
    at = int(along[0]) % len(values.shape)
    if not has_rows(values, place.picked.at(at), step):
        return None
    before, after = values.shape[:at], values.shape[at + 1 :]
    shape = (*before, *places.shape, *after)
    rows = place.rows.at(at + place.rows.axis)
    return examples(rows, values.degree, shape=shape)


def _indexed(places: Value) -> tuple[Place, int] | None:
    """The places along the first axis, and how many axes indices count.

    Along the others each example has indices of its own.
    """
    meaning, shape = places.meaning, places.shape
    if isinstance(meaning, Place) and shape and shape[-1] == 1:
        return (meaning, 1) if len(shape) > 1 else None
    if not isinstance(meaning, Columns):
        return None
    first, *others = meaning.items
    if any(isinstance(item, Place) for item in others):
        return None
    return (first, len(meaning.items)) if isinstance(first, Place) else None


@rule("Pack", "ConcatV2")
def _joined(step: Step, *values: Value) -> Value | None:
    """Indices along several axes: one column for each."""
    if not any(isinstance(value.meaning, Place) for value in values):
        return None
    parts, node = list(values), step.node
    if node.type == "Pack":
        axis, rank = node.attr("axis"), 1
    else:
        axis, rank = *step.known(step.tensor(len(values) - 1)), 2
        parts.pop()
    if axis not in (1, -1) or any(len(p.shape or ()) != rank for p in parts):
        return None
    plain = [
        stand_in(part) if isinstance(part.meaning, Place) else part
        for part in parts
    ]
    if any(p.kind not in (Kind.SAME, Kind.ROWS) for p in plain):
        return None
    whole = aligned(node, plain, 0, [rank] * len(parts))
    if any(not part.is_free for part in plain) or whole.rows is None:
        return None
    if whole.rows.axis or whole.shape is None:
        return None
    items: list[Any] = []
    for part in parts:
        assert part.shape is not None
        count = 1 if rank == 1 else part.shape[1]
        if not isinstance(count, int):
            return None
        is_place = isinstance(part.meaning, Place)
        if is_place and count != 1:
            return None
        items += [part.meaning if is_place else None] * count
    columns = Columns(whole.rows, tuple(items))
    return numbered(columns, (whole.shape[0], len(items)))


def _rows_of(value: Value) -> Rows:
    meaning = value.meaning
    assert isinstance(meaning, Columns | Place)
    return meaning.rows


@rule("GatherNd")
def _picked_at(step: Step, values: Value, places: Value) -> Value | None:
    found = _indexed(places)
    if found is None or values.shape is None or places.shape is None:
        return None
    place, count = found
    if not has_rows(values, place.picked, step) or len(values.shape) < count:
        return None
    shape = (*places.shape[:-1], *values.shape[count:])
    return examples(_rows_of(places), values.degree, shape=shape)


@rule("ScatterNd")
def _put_back(
    step: Step, places: Value, updates: Value, shape: Value
) -> Value | None:
    found = _indexed(places)
    if found is None or shape.known is None:
        return None
    place, sizes = found[0], tuple(shape.known.flat)
    if sizes[0] != shape_of_picked(updates, place)[0]:
        return None
    if not has_rows(updates, _rows_of(places), step):
        return None
    return examples(place.picked, updates.degree, shape=sizes)


@rule(
    *("UnsortedSegmentSum", "UnsortedSegmentProd"),
    *("UnsortedSegmentMax", "UnsortedSegmentMin"),
)
def _added_up(
    step: Step, values: Value, places: Value, count: Value
) -> Value | None:
    place = places.meaning
    if not isinstance(place, Place) or len(places.shape or ()) != 1:
        return None
    shape = shape_of_picked(values, place)
    if count.known is None or count.known.flat[0] != shape[0]:
        return None
    if not has_rows(values, place.rows, step):
        return None
    if step.node.type != "UnsortedSegmentSum":
        # Where there are no entries, it is a number.
        free(step.node, values)
    return examples(place.picked, values.degree, shape=shape)


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd")
def _added_up_in_order(
    step: Step, values: Value, places: Value
) -> Value | None:
    """There are as many segments as examples, of which none is empty."""
    place = places.meaning
    if not isinstance(place, Place) or place.unit is not None:
        return None
    if place.times != 1 or place.rows.unit is not None or place.rows.axis:
        return None
    if len(places.shape or ()) != 1 or not has_rows(values, place.rows, step):
        return None
    if step.node.type == "SegmentProd":
        free(step.node, values)
    shape = shape_of_picked(values, place)
    return examples(place.picked, values.degree, shape=shape)


@rule("CropAndResize", "CropAndResizeGradBoxes")
def _of_boxes(step: Step, *values: Value) -> Value | None:
    """What is computed for each box, of the image that it belongs to."""
    if step.node.type == "CropAndResize":
        images, boxes, places, size = values
        more = boxes, size
    else:
        upstream, images, boxes, places = values
        more = boxes, upstream
    place = places.meaning
    if not isinstance(place, Place) or not has_rows(images, place.picked, step):
        return None
    if not boxes.is_free:
        return None
    for value in more:
        if value.rows is not None and not has_rows(value, place.rows, step):
            return None
        if value.rows is None and (value.kind is not Kind.SAME or value.grows):
            return None
    static = step.node.static_shape() or (None,) * 4
    count = None if places.shape is None else places.shape[0]
    return examples(place.rows, values[0].degree, shape=(count, *static[1:]))


@rule("CropAndResizeGradImage")
def _to_images(
    step: Step, upstream: Value, boxes: Value, places: Value, size: Value
) -> Value | None:
    place = places.meaning
    if not isinstance(place, Place) or size.known is None:
        return None
    sizes = tuple(size.known.flat)
    if sizes[0] != shape_of_picked(upstream, place)[0]:
        return None
    if not has_rows(upstream, place.rows, step):
        return None
    if boxes.rows is not None and not has_rows(boxes, place.rows, step):
        return None
    if not boxes.is_free or boxes.kind not in (Kind.SAME, Kind.ROWS):
        return None
    return examples(place.picked, upstream.degree, shape=sizes)
