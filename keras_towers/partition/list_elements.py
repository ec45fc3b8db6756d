"""Lists of tensors, and how they are laid out over towers.

A list is laid out as its elements are: of each, every tower has its own rows or
its part of a sum. If the elements themselves are the rows, such as one for each
example, every tower has a list of its own elements. An optional value is a list
that has one element, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Layout,
    ListOf,
    Partial,
    Shape,
    Sharded,
    Value,
    require,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import UNKNOWN

if TYPE_CHECKING:
    from keras_towers.partition.conversions import Converter


@dataclasses.dataclass(frozen=True)
class Elements:
    """What is known of the elements of a list, as one device has it.

    Attributes:
        dtype: that of each.
        declared: the shape that the list was declared to have: its entries, -1
            where they may be any; None: it is not known.
        length: how many they are, or ``UNKNOWN``.
        item: what is known of each that was set; None: none was set yet.
        is_full: whether all were set.
        are_places: whether each that was set is the number of its place.
        is_optional: whether it is no list, but an optional value.
    """

    dtype: Any
    declared: Any = None
    length: Any = UNKNOWN
    item: Value | None = None
    is_full: bool = True
    are_places: bool = True
    is_optional: bool = False

    @property
    def shape(self) -> Shape | None:
        """The shape of each that was set, as far as it is known."""
        return None if self.item is None else self.item.shape


# ---- what is known -----------------------------------------------------------


def elements_of(value: Value) -> Elements:
    """Return what is known of a list's elements.

    Raises:
        NotDivided: if nothing is.
    """
    require(value.element is not None)
    return cast("Elements", value.element)


def one_more(
    elements: Elements | None, item: Value, is_place: bool = False
) -> Elements | None:
    """Return what is known of elements if one of them is set."""
    if elements is None:
        return None
    with_item = dataclasses.replace(elements, item=item, are_places=is_place)
    return joined_elements(elements, with_item)


def in_common(a: Value, b: Value, layout: Layout = REPLICATED) -> Value:
    """Return what is known of a value that is one of two."""
    return Value(
        layout,
        shape=_joined_shapes(a.shape, b.shape),
        known=_joined_entries(a.known, b.known),
        element=joined_elements(a.element, b.element),
    )


def joined_elements(a: Elements | None, b: Elements | None) -> Elements | None:
    """Return what is known of the elements of a list that is one of two."""
    if a is None or b is None:
        return None
    if (a.dtype, a.is_optional) != (b.dtype, b.is_optional):
        return None
    # Of what there is none, everything is true.
    items = [e.item for e in (a, b) if e.item is not None]
    return Elements(
        a.dtype,
        a.declared if a.declared == b.declared else None,
        a.length if a.length == b.length else UNKNOWN,
        in_common(items[0], items[-1]) if items else None,
        a.is_full and b.is_full,
        a.are_places and b.are_places,
        a.is_optional,
    )


def _joined_shapes(a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None or len(a) != len(b):
        return None
    pairs = zip(a, b, strict=True)
    return tuple(one if one == other else UNKNOWN for one, other in pairs)


def _joined_entries(a: Any, b: Any) -> Any:
    if a is None or b is None or np.shape(a) != np.shape(b):
        return None
    either = np.frompyfunc(lambda x, y: x if x == y else UNKNOWN, 2, 1)
    entries = np.empty(np.shape(a), object)
    entries[...] = either(a, b)
    return entries


def alike(a: Value, b: Value) -> bool:
    """Whether two values are laid out alike, and as much is known of them."""
    return bool(_facts(a) == _facts(b))


def _facts(value: Value | None) -> Any:
    if value is None:
        return None
    known, elements = value.known, value.element
    entries = None if known is None else (np.shape(known), known.tolist())
    facts = value.layout, value.shape, entries
    if elements is None:
        return facts
    rest = dataclasses.replace(elements, item=None)
    return (*facts, rest, _facts(elements.item))


# ---- conversions -------------------------------------------------------------


def list_on_tower(partition: Converter, value: Value, layout: ListOf) -> Tensor:
    """Return what each tower has of a list.

    Args:
        partition: makes the operations.
        value: the list.
        layout: how it is to be laid out.

    Raises:
        NotDivided: if it has no such.
    """
    if value.layout == layout:
        return cast("Tensor", value.local)
    require(value.is_replicated)
    elements, element = elements_of(value), layout.element
    if _has_nothing(elements):
        return partition.replicated(value)
    declared = _declared_shape(partition, elements, element)
    handle = partition.replicated(value)
    if elements.item is None:
        if isinstance(element, Sharded) and element.axis < 0:
            length = partition.cast(element.unit.count, tf.int32)
        else:
            length = partition.op("TensorListLength", [handle], ())
        dtype = elements.dtype
        return partition.op(
            "TensorListReserve", [declared, length], (), element_dtype=dtype
        )
    require(elements.is_full and not isinstance(element, ListOf))
    sizes = shape_on_tower(partition, elements.shape)
    stacked = partition.op(
        "TensorListStack", [handle, sizes], element_dtype=elements.dtype
    )
    shape = (elements.length, *(elements.shape or ()))
    whole = Value(REPLICATED, whole=stacked, shape=shape)
    if isinstance(element, Partial):
        rows = partition.partial(whole)
    else:
        rows = partition.rows(whole, behind(element))
    return partition.op("TensorListFromTensor", [rows, declared], ())


def _has_nothing(elements: Elements) -> bool:
    """Whether all there is are optional values that are not there."""
    if elements.item is None:
        return elements.is_optional
    inner = elements.item.element
    return inner is not None and _has_nothing(inner)


def whole_list(partition: Converter, value: Value) -> Tensor:
    """Return the list of one device, which all have.

    Raises:
        NotDivided: if it cannot be gathered.
    """
    elements, element = elements_of(value), cast("ListOf", value.layout).element
    require(not isinstance(element, ListOf))
    # Its shape is known whole, as a tower may have no elements.
    sizes = shape_on_tower(partition, elements.shape, element)
    declared = _declared_shape(partition, elements, PARTIAL)
    stacked = partition.op(
        "TensorListStack", [value.local, sizes], element_dtype=elements.dtype
    )
    shape = (elements.length, *(elements.shape or ()))
    whole = partition.whole(Value(behind(element), stacked, shape=shape))
    return partition.op("TensorListFromTensor", [whole, declared], ())


def are_rows(element: Layout) -> bool:
    """Whether the elements of a list are rows, of which each tower has some."""
    return isinstance(element, Sharded) and element.axis < 0


def behind(element: Any) -> Any:
    """Return how elements of a list are laid out if they are stacked."""
    if isinstance(element, Sharded):
        return element.along(element.axis + 1)
    return element


def shape_on_tower(
    partition: Converter, shape: Sequence[Any] | None, layout: Any = None
) -> Tensor:
    """Return the shape of a tower's elements.

    Args:
        partition: makes the operations.
        shape: that of one device.
        layout: how they are laid out.

    Raises:
        NotDivided: if it is not known whole.
    """
    require(shape is not None)
    sizes = [partition.size(size) for size in shape or ()]
    if isinstance(layout, Sharded) and 0 <= layout.axis < len(sizes):
        sizes[layout.axis] = partition.times(layout.count, layout.unit.count)
    require(None not in sizes)
    return partition.vector(cast("list[Tensor]", sizes), tf.int32)


def _declared_shape(
    partition: Converter, elements: Elements, layout: Any
) -> Tensor:
    """What a tower's list is declared to have as the shape of its elements."""
    declared = elements.declared
    if declared is not None and not np.ndim(declared):
        return partition.constant(-1, tf.int32)
    has_rows = isinstance(layout, Sharded) and layout.axis >= 0
    if declared and has_rows:
        require(fits(declared[layout.axis], layout))
    return shape_on_tower(partition, declared, layout)


def fits(size: Any, layout: Sharded) -> bool:
    """Whether an axis of a declared shape may have rows."""
    return size is not UNKNOWN and size in (-1, layout.size)
