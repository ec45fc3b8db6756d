"""The ranges of axes that slices and splits select, as far as known."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from keras_towers.partition.ir.sizes import UNKNOWN, Dimension, compared
from keras_towers.partition.layout.nodes import Node

# Stops that Keras uses for "to the end".
_FAR = (2**31 - 1, 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class Span:
    """The range of an axis that a slice selects.

    Attributes:
        axis: the axis of the sliced tensor; None for a new axis.
        begin: the first index.
        size: the number of entries; None: all entries.
        stride: the distance between entries.
        dropped: whether a single entry is selected, and the axis is dropped.
    """

    axis: int | None
    begin: Dimension = 0
    size: Dimension | None = None
    stride: int = 1
    dropped: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it covers the whole axis."""
        return self.axis is not None and self.size is None


def spans(node: Node, shape: Sequence[Dimension], *ends: Any) -> list[Span]:
    """Return the spans of a slice, axis by axis.

    Args:
        node: a slice, a strided slice, or the gradient of one.
        shape: the shape of the sliced tensor.
        *ends: the known entries of its begin and size, or of its begin, end and
            strides.
    """
    if node.type == "Slice":
        return [
            _span_of_size(*entries)
            for entries in zip(range(len(shape)), shape, *ends, strict=True)
        ]
    begin, end, strides = ends
    masks = {
        name: node.attr(f"{name}_mask")
        for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")
    }
    # An entry is the ellipsis, a new axis, or the range of an axis.
    others = masks["ellipsis"] | masks["new_axis"]
    named = sum(not others >> k & 1 for k in range(len(strides)))
    taken: list[Span] = []
    axis = 0
    for k, stride in enumerate(strides):
        if masks["ellipsis"] >> k & 1:
            left = len(shape) - named
            taken += [Span(a) for a in range(axis, axis + left)]
            axis += left
            continue
        if masks["new_axis"] >> k & 1:
            taken.append(Span(None))
            continue
        if masks["shrink_axis"] >> k & 1:
            taken.append(Span(axis, begin[k], 1, dropped=True))
        else:
            first = None if masks["begin"] >> k & 1 else begin[k]
            last = None if masks["end"] >> k & 1 else end[k]
            taken.append(_span(axis, shape[axis], first, last, stride))
        axis += 1
    return taken + [Span(a) for a in range(axis, len(shape))]


def split_sizes(
    sizes: Sequence[Dimension], whole: Dimension
) -> list[Dimension]:
    """Return the sizes of the parts of a split.

    Args:
        sizes: the given sizes; -1: the rest.
        whole: the size of the axis.
    """
    rest = whole - sum(size for size in sizes if size != -1)
    return [rest if size == -1 else size for size in sizes]


def _span_of_size(
    axis: int, whole: Dimension, begin: Dimension, size: Dimension
) -> Span:
    if begin == 0 and (size == -1 or size == whole):
        return Span(axis)
    return Span(axis, begin, whole - begin if size == -1 else size)


def _span(
    axis: int,
    size: Dimension,
    begin: Dimension | None,
    end: Dimension | None,
    stride: Dimension,
) -> Span:
    stride = stride if isinstance(stride, int) else 0
    if (
        isinstance(size, int)
        and isinstance(begin, int | None)
        and isinstance(end, int | None)
        and stride
    ):
        taken = range(size)[slice(begin, end, stride)]
        if taken == range(size):
            return Span(axis)
        return Span(axis, taken.start, len(taken), stride)
    begin = 0 if begin is None else begin
    is_last = end is None or end == size or end in _FAR
    if stride == 1 and begin == 0 and is_last:
        return Span(axis)
    end = size if is_last or end is None else end
    begin, end = _from_end(begin, size), _from_end(end, size)
    inside = [
        compared(operator.le, *pair) is True
        for pair in ((0, begin), (begin, end), (end, size))
    ]
    if not all(inside) or stride < 1:
        return Span(axis, UNKNOWN, UNKNOWN, stride or 0)
    if stride == 1:
        length = end - begin
    else:
        starts = isinstance(begin, int) and begin < stride
        length = size // stride if starts and is_last else UNKNOWN
    return Span(axis, begin, length, stride)


def _from_end(end: Dimension, size: Dimension) -> Dimension:
    """Convert an index that may count from the end."""
    negative = compared(operator.lt, end, 0)
    if negative is UNKNOWN:
        return UNKNOWN
    return size + end if negative else end
