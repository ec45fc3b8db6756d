"""Lists of tensors, and how they are laid out over towers.

A list is laid out as its elements are: of each, every tower has its own rows or
its part of a sum. If the elements themselves are the rows, such as one for each
example, every tower has a list of its own elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.layouts import (
    PARTIAL,
    ListOf,
    Partial,
    Shape,
    Sharded,
    Value,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import UNKNOWN

if TYPE_CHECKING:
    from keras_towers.partition.partitioner import Partitioner


@dataclasses.dataclass(frozen=True, eq=False)
class Elements:
    """What is known of the elements of a list, as one device has it.

    Attributes:
        dtype: that of each.
        told: the shape that the list was told they have: its entries, -1 where
            they may be any; None: it is not known.
        length: how many they are, if that is known.
        shape: the shape of each that was set, as far as it is known.
        known: the entries of each that was set, as far as they are known.
        element: of lists of lists: what is known of the elements of each.
        is_empty: whether none was set yet.
        is_full: whether all were set.
        are_places: whether each is the number of its place in the list.
        is_optional: whether it is no list, but an optional value.
    """

    dtype: Any
    told: Any = None
    length: Any = None
    shape: Shape | None = None
    known: Any = None
    element: Elements | None = None
    is_empty: bool = True
    is_full: bool = True
    are_places: bool = False
    is_optional: bool = False


def one_more(elements: Elements | None, item: Value) -> Elements | None:
    """Return what is known of elements if one of them is set."""
    if elements is None:
        return None
    own = dataclasses.replace(
        elements,
        shape=item.shape,
        known=item.known,
        element=item.element,
        is_empty=False,
        are_places=False,
    )
    return own if elements.is_empty else joined_elements(elements, own)


def joined_elements(a: Elements | None, b: Elements | None) -> Elements | None:
    """Return what is known of the elements of a list that is one of two."""
    if a is None or b is None:
        return None
    if (a.dtype, a.is_optional) != (b.dtype, b.is_optional):
        return None
    if a.is_empty or b.is_empty:
        # Of what there is none, everything is true.
        full = b if a.is_empty else a
    else:
        full = dataclasses.replace(
            a,
            shape=joined_shapes(a.shape, b.shape),
            known=joined_entries(a.known, b.known),
            element=joined_elements(a.element, b.element),
            are_places=a.are_places and b.are_places,
        )
    return dataclasses.replace(
        full,
        told=a.told if alike_entries(a.told, b.told) else None,
        length=a.length if a.length == b.length else None,
        is_full=a.is_full and b.is_full,
    )


def joined_shapes(a: Shape | None, b: Shape | None) -> Shape | None:
    """Return what two shapes have in common."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(
        one if one == other else None for one, other in zip(a, b, strict=True)
    )


def joined_entries(a: Any, b: Any) -> Any:
    """Return which entries two tensors have in common."""
    if a is None or b is None or np.shape(a) != np.shape(b):
        return None
    either = np.frompyfunc(lambda x, y: x if x == y else UNKNOWN, 2, 1)
    found = np.empty(np.shape(a), object)
    found[...] = either(a, b)
    return found


def alike_entries(a: Any, b: Any) -> bool:
    """Whether as much is known of the entries of two tensors."""
    if a is None or b is None:
        return a is b
    return np.shape(a) == np.shape(b) and bool(np.all(np.equal(a, b)))


def alike_elements(a: Elements | None, b: Elements | None) -> bool:
    """Whether the same is known of the elements of two lists."""
    if a is None or b is None:
        return a is b
    return (
        _facts(a) == _facts(b)
        and alike_entries(a.told, b.told)
        and alike_entries(a.known, b.known)
        and alike_elements(a.element, b.element)
    )


def _facts(elements: Elements) -> tuple[Any, ...]:
    return (
        elements.dtype,
        elements.length,
        elements.shape,
        elements.is_empty,
        elements.is_full,
        elements.are_places,
        elements.is_optional,
    )


def own_list(
    partition: Partitioner, value: Value, layout: ListOf
) -> Tensor | None:
    """Return what each tower has of a list; None: it has no such.

    Args:
        partition: makes the operations.
        value: the list.
        layout: how it is to be laid out.
    """
    if value.layout == layout:
        return value.local
    elements = value.element
    if not value.is_replicated or elements is None:
        return None
    if _has_nothing(elements):
        return partition.local(value)
    if elements.told is None:
        return None
    build, element = partition.builder, layout.element
    told = _told(partition, elements, element)
    if told is None:
        return None
    handle = partition.local(value)
    if elements.is_empty:
        length = _length(partition, elements, handle, element)
        return build.op(
            "TensorListReserve",
            [told, length],
            (),
            element_dtype=elements.dtype,
        )
    sizes = _sizes(partition, elements.shape)
    if isinstance(element, ListOf) or sizes is None or not elements.is_full:
        return None
    stacked = build.op(
        "TensorListStack",
        [handle, partition.vector(sizes, tf.int32)],
        element_dtype=elements.dtype,
    )
    shape = (elements.length, *(elements.shape or ()))
    whole = dataclasses.replace(
        value, whole=stacked, local=None, shape=shape, element=None
    )
    if isinstance(element, Partial):
        own: Tensor | None = partition.partial(whole)
    else:
        own = partition.rows(whole, element.along(element.axis + 1))
    if own is None:
        return None
    return build.op("TensorListFromTensor", [own, told], ())


def _has_nothing(elements: Elements) -> bool:
    """Whether all there is are optional values that are not there."""
    if elements.is_empty:
        return elements.is_optional
    return elements.element is not None and _has_nothing(elements.element)


def whole_list(partition: Partitioner, value: Value) -> Tensor | None:
    """Return the list of one device, which all have; None: it cannot be had."""
    layout, elements = value.layout, value.element
    if not isinstance(layout, ListOf) or isinstance(layout.element, ListOf):
        return None
    if elements is None or elements.told is None or value.local is None:
        return None
    element, build = layout.element, partition.builder
    sizes = _sizes(partition, elements.shape)
    told = _told(partition, elements, PARTIAL)
    if sizes is None or told is None:
        return None
    if isinstance(element, Sharded) and element.axis >= 0:
        sizes[element.axis] = partition.times(element.count, element.unit.count)
    # Its shape is known whole, as a tower may have no elements.
    stacked = build.op(
        "TensorListStack",
        [value.local, partition.vector(sizes, tf.int32)],
        element_dtype=elements.dtype,
    )
    shape = (elements.length, *(elements.shape or ()))
    behind: Any = PARTIAL
    if isinstance(element, Sharded):
        behind = element.along(element.axis + 1)
    whole = partition.whole(Value(behind, stacked, shape=shape))
    return build.op("TensorListFromTensor", [whole, told], ())


def _sizes(
    partition: Partitioner, shape: Sequence[Any] | None
) -> list[Tensor] | None:
    """The sizes of a shape that is known whole, as tensors."""
    found = [partition.size(size) for size in shape or ()]
    known = [size for size in found if size is not None]
    return None if shape is None or len(known) < len(found) else known


def _told(partition: Partitioner, elements: Elements, layout: Any) -> Any:
    """What a tower's list is told of the shape of its elements."""
    told = elements.told
    if not np.ndim(told):
        return partition.builder.constant(-1, tf.int32)
    found = _sizes(partition, list(told))
    if found is None:
        return None
    if isinstance(layout, Sharded) and layout.axis >= 0:
        if not fits(told[layout.axis], layout):
            return None
        found[layout.axis] = partition.times(layout.count, layout.unit.count)
    return partition.vector(found, tf.int32)


def fits(size: Any, layout: Sharded) -> bool:
    """Whether an axis that a list was told of may have rows."""
    return size is not UNKNOWN and size in (-1, layout.size)


def _length(
    partition: Partitioner, elements: Elements, handle: Tensor, layout: Any
) -> Tensor:
    """How many elements a tower's list has."""
    build = partition.builder
    if isinstance(layout, Sharded) and layout.axis < 0:
        return partition.cast(layout.unit.count, tf.int32)
    if isinstance(elements.length, int):
        return build.constant(elements.length, tf.int32)
    return build.op("TensorListLength", [handle], ())
