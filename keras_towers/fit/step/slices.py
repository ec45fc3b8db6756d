"""Rules for operations that cut, gather and join: see ``axes``."""

from __future__ import annotations

import dataclasses
import fractions
import math
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class From:
    """Says that a dimension is that of an input, times a factor.

    Attributes:
        tensor: the input.
        axis: its dimension.
        scale: rows of the output for each row of the input.
    """

    tensor: Any
    axis: int
    scale: fractions.Fraction = fractions.Fraction(1)


def constant(tensor: Any) -> Any:
    """Return a static value as an array or a number; None if there is none."""
    value = tf.get_static_value(tensor)
    return value if value is None or np.ndim(value) else value.item()


def elements(vector: Any) -> list[Any]:
    """Return the static elements of a vector; NaN for others."""
    value = constant(vector)
    if value is not None:
        return [int(item) for item in value]
    if vector.op.type == "Pack":
        items = [constant(item) for item in vector.op.inputs]
        return [math.nan if item is None else int(item) for item in items]
    return [math.nan] * vector.shape[0]


def start_of_slice(tensor: tf.Tensor) -> tuple[int, int] | None:
    """Return the first index and the stride of a slice of a vector."""
    entries = _entries(tensor)
    if entries is None or len(entries) != 1:
        return None
    begin, _, stride, _ = entries[0]
    return (begin or 0, stride) if stride > 0 else None


def _entries(tensor: tf.Tensor) -> list[tuple] | None:
    """The slices (begin, end, stride, drops) of a StridedSlice, by input axis.

    ``begin`` and ``end`` are None where the slice is open. None if there is a
    new axis, or a value is not static.
    """
    op = tensor.op
    strides = constant(op.inputs[3])
    rank = op.inputs[0].shape.rank
    if strides is None or rank is None or op.get_attr("new_axis_mask"):
        return None
    begins = elements(op.inputs[1])
    ends = elements(op.inputs[2])
    entries: list[tuple] = []
    for index, stride in enumerate(strides):
        bit = 1 << index
        if op.get_attr("ellipsis_mask") & bit:
            missing = rank - (len(strides) - 1)
            entries += [(None, None, 1, False)] * missing
            continue
        drops = bool(op.get_attr("shrink_axis_mask") & bit)
        begin = None if op.get_attr("begin_mask") & bit else begins[index]
        end = None if op.get_attr("end_mask") & bit else ends[index]
        entries.append((begin, end, int(stride), drops))
    return entries


def first_of(walk: Any, parts: Any, axis: int, size: int | None) -> Any:
    """The first of the inputs from which a dimension of that size may be.

    Args:
        walk: explains dimensions.
        parts: the inputs.
        axis: their dimension.
        size: that of the output; None if it is not static.
    """
    found = [
        part
        for part in parts
        if part.shape.rank is not None and part.shape[axis] in (None, size)
    ]
    if size is not None and len(found) > 1:
        return walk.of_any(found, axis)
    return From(found[0], axis) if found else None


def strided_slice(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``StridedSlice``: a cut dimension is no longer that of the batch."""
    entries = _entries(tensor)
    whole = tensor.op.inputs[0]
    if entries is None:
        return None
    entries += [(None, None, 1, False)] * (whole.shape.rank - len(entries))
    kept = [place for place, entry in enumerate(entries) if not entry[3]]
    begin, end, stride, _ = entries[kept[axis]]
    if begin in (None, 0) and end is None and stride == 1:
        return From(whole, kept[axis])
    found = walk.of(whole, kept[axis])
    return found if isinstance(found, str) else None


def cut(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``Slice``, like ``strided_slice``."""
    whole, begin, size = tensor.op.inputs
    if elements(begin)[axis] == 0 and elements(size)[axis] == -1:
        return From(whole, axis)
    found = walk.of(whole, axis)
    return found if isinstance(found, str) else None


def split(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``Split`` and ``SplitV``: along any dimension but the given one."""
    first = tensor.op.type == "Split"
    place = constant(tensor.op.inputs[0 if first else 2])
    whole = tensor.op.inputs[1 if first else 0]
    if place is None or place % whole.shape.rank == axis:
        return None
    return From(whole, axis)


def surrounded(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``Pad`` and its like: dimensions that nothing is added to."""
    before, widths = tensor.op.inputs[:2]
    around = constant(widths)
    if around is not None and not np.any(around[axis]):
        return From(before, axis)
    found = walk.of(before, axis)
    return found if isinstance(found, str) else None


def gather(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``Gather``: the dimensions of the indices replace one."""
    values, indices, *rest = tensor.op.inputs
    place = constant(rest[0]) if rest else 0
    depth = indices.shape.rank
    if place is None or depth is None:
        return None
    skipped = 0
    if "batch_dims" in tensor.op.node_def.attr:
        skipped = tensor.op.get_attr("batch_dims")
    if values.dtype != tf.resource:
        place %= values.shape.rank
    if axis < place:
        return From(values, axis)
    if axis < place + depth - skipped:
        return From(indices, axis - place + skipped)
    if values.dtype == tf.resource:
        return None
    return From(values, axis - depth + skipped + 1)


def gather_nd(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``GatherNd``: the indices' dimensions but the last come first."""
    values, indices = tensor.op.inputs
    depth = indices.shape[-1]
    if axis < indices.shape.rank - 1:
        return From(indices, axis)
    if depth is None:
        return None
    return From(values, axis - (indices.shape.rank - 1) + depth)


def tiled(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``Tile``: a repeated batch consists of several blocks."""
    before, times = tensor.op.inputs
    count = walk.of_element(times, axis)
    if count == 1:
        return From(before, axis)
    if before.shape[axis] == 1:
        return count
    inside = walk.of(before, axis)
    if isinstance(inside, tuple) and isinstance(count, int):
        return inside * count
    same = isinstance(inside, (int, str)) and isinstance(count, (int, str))
    return "same" if same else None


def concatenated(walk: Any, tensor: tf.Tensor, axis: int) -> Any:
    """``ConcatV2``: joined batches are blocks one after another."""
    *parts, place = tensor.op.inputs
    place = constant(place)
    if place is None:
        return None
    if place % tensor.shape.rank != axis:
        return first_of(walk, parts, axis, tensor.shape[axis])
    found = [walk.of(part, axis) for part in parts]
    if all(isinstance(part, tuple) for part in found):
        return sum(found, ())
    same = all(isinstance(part, (int, str)) for part in found)
    return "same" if same else None
