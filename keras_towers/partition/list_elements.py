"""Lists of tensors, and the facts that hold for their elements.

A list has the layout of its elements: every tower has its rows, or its partial
sum, of each. If each element is a row, such as an example, the list of a tower
contains its own rows. An optional value is a list with one element or none.
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
    """The facts that hold for the elements of a list on one device.

    Attributes:
        dtype: the dtype of the elements.
        declared: the declared shape of elements, -1 for any size; None:
            unknown.
        length: the number of elements, or ``UNKNOWN``.
        item: the facts shared by all elements that were set; None: none was.
        is_full: whether all elements were set.
        are_row_numbers: whether each element that was set is its own index.
        is_optional: whether it is an optional value, not a list.
    """

    dtype: Any
    declared: Any = None
    length: Any = UNKNOWN
    item: Value | None = None
    is_full: bool = True
    are_row_numbers: bool = True
    is_optional: bool = False

    @property
    def shape(self) -> Shape | None:
        """The shape of the elements that were set, as far as it is known."""
        return None if self.item is None else self.item.shape


# ---- facts -------------------------------------------------------------------


def elements_of(value: Value) -> Elements:
    """Return the facts about a list's elements.

    Raises:
        NotDivided: nothing is known about them.
    """
    require(value.elements is not None)
    return cast("Elements", value.elements)


def with_item(
    elements: Elements | None, item: Value, is_row_number: bool = False
) -> Elements | None:
    """Return the facts after an element was set."""
    if elements is None:
        return None
    with_item = dataclasses.replace(
        elements, item=item, are_row_numbers=is_row_number
    )
    return common_elements(elements, with_item)


def common_facts(a: Value, b: Value, layout: Layout = REPLICATED) -> Value:
    """Return the facts that two values share."""
    return Value(
        layout,
        shape=_common_shape(a.shape, b.shape),
        known=_common_entries(a.known, b.known),
        elements=common_elements(a.elements, b.elements),
    )


def common_elements(a: Elements | None, b: Elements | None) -> Elements | None:
    """Return the facts that the elements of two lists share."""
    if a is None or b is None:
        return None
    if (a.dtype, a.is_optional) != (b.dtype, b.is_optional):
        return None
    # A list without elements satisfies any fact.
    items = [e.item for e in (a, b) if e.item is not None]
    return Elements(
        a.dtype,
        a.declared if a.declared == b.declared else None,
        a.length if a.length == b.length else UNKNOWN,
        common_facts(items[0], items[-1]) if items else None,
        a.is_full and b.is_full,
        a.are_row_numbers and b.are_row_numbers,
        a.is_optional,
    )


def _common_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None or len(a) != len(b):
        return None
    pairs = zip(a, b, strict=True)
    return tuple(one if one == other else UNKNOWN for one, other in pairs)


def _common_entries(a: Any, b: Any) -> Any:
    if a is None or b is None or np.shape(a) != np.shape(b):
        return None
    either = np.frompyfunc(lambda x, y: x if x == y else UNKNOWN, 2, 1)
    entries = np.empty(np.shape(a), object)
    entries[...] = either(a, b)
    return entries


def have_same_facts(a: Value, b: Value) -> bool:
    """Whether two values have the same layout, and the same facts."""
    return bool(_facts(a) == _facts(b))


def _facts(value: Value | None) -> Any:
    if value is None:
        return None
    known, elements = value.known, value.elements
    entries = None if known is None else (np.shape(known), known.tolist())
    facts = value.layout, value.shape, entries
    if elements is None:
        return facts
    # In a tuple an unknown length is the same as itself.
    names = [f.name for f in dataclasses.fields(elements) if f.name != "item"]
    rest = [getattr(elements, name) for name in names]
    return (*facts, *rest, _facts(elements.item))


# ---- conversions -------------------------------------------------------------


def local_list(partitioner: Converter, value: Value, layout: ListOf) -> Tensor:
    """Return the local list of a list on every tower.

    Args:
        partitioner: the partitioner of the program.
        value: the list.
        layout: the layout of the result.

    Raises:
        NotDivided: the list cannot have this layout.
    """
    if value.layout == layout:
        return cast("Tensor", value.local)
    require(value.is_replicated)
    elements, element = elements_of(value), layout.element
    if _is_empty_optional(elements):
        return partitioner.replicate(value)
    declared = _declared_shape(partitioner, elements, element)
    handle = partitioner.replicate(value)
    if elements.item is None:
        if isinstance(element, Sharded) and element.axis < 0:
            length = partitioner.cast(element.unit.count, tf.int32)
        else:
            length = partitioner.op("TensorListLength", [handle], ())
        dtype = elements.dtype
        return partitioner.op(
            "TensorListReserve", [declared, length], (), element_dtype=dtype
        )
    require(elements.is_full and not isinstance(element, ListOf))
    sizes = local_element_shape(partitioner, elements.shape)
    stacked = partitioner.op(
        "TensorListStack", [handle, sizes], element_dtype=elements.dtype
    )
    shape = (elements.length, *(elements.shape or ()))
    whole = Value(REPLICATED, whole=stacked, shape=shape)
    if isinstance(element, Partial):
        rows = partitioner.to_partial(whole)
    else:
        rows = partitioner.shard(whole, stacked_layout(element))
    return partitioner.op("TensorListFromTensor", [rows, declared], ())


def _is_empty_optional(elements: Elements) -> bool:
    """Whether it is an optional value without an element, however nested."""
    if elements.item is None:
        return elements.is_optional
    inner = elements.item.elements
    return inner is not None and _is_empty_optional(inner)


def gather_list(partitioner: Converter, value: Value) -> Tensor:
    """Return the whole list, gathered from all towers.

    Raises:
        NotDivided: the facts do not suffice to gather it.
    """
    elements, element = elements_of(value), cast("ListOf", value.layout).element
    require(not isinstance(element, ListOf))
    # TensorFlow needs the full shape if a tower has no elements.
    sizes = local_element_shape(partitioner, elements.shape, element)
    declared = _declared_shape(partitioner, elements, PARTIAL)
    stacked = partitioner.op(
        "TensorListStack", [value.local, sizes], element_dtype=elements.dtype
    )
    shape = (elements.length, *(elements.shape or ()))
    whole = partitioner.assemble(
        Value(stacked_layout(element), stacked, shape=shape)
    )
    return partitioner.op("TensorListFromTensor", [whole, declared], ())


def is_row_per_element(element: Layout) -> bool:
    """Whether each element of a list is a row."""
    return isinstance(element, Sharded) and element.axis < 0


def stacked_layout(element: Any) -> Any:
    """Return the layout of a stack of elements."""
    if isinstance(element, Sharded):
        return element.at_axis(element.axis + 1)
    return element


def local_element_shape(
    partitioner: Converter, shape: Sequence[Any] | None, layout: Any = None
) -> Tensor:
    """Return the local shape of elements.

    Args:
        partitioner: the partitioner of the program.
        shape: the global shape.
        layout: the layout of the elements.

    Raises:
        NotDivided: the shape is not known completely.
    """
    require(shape is not None)
    sizes = [partitioner.global_size(size) for size in shape or ()]
    if isinstance(layout, Sharded) and 0 <= layout.axis < len(sizes):
        sizes[layout.axis] = partitioner.local_rows(layout)
    require(None not in sizes)
    return partitioner.size_vector(cast("list[Tensor]", sizes), tf.int32)


def _declared_shape(
    partitioner: Converter, elements: Elements, layout: Any
) -> Tensor:
    """Return the shape that the local list declares for its elements."""
    declared = elements.declared
    if declared is not None and not np.ndim(declared):
        return partitioner.constant(-1, tf.int32)
    has_rows = isinstance(layout, Sharded) and layout.axis >= 0
    if declared and has_rows:
        require(may_hold_rows(declared[layout.axis], layout))
    return local_element_shape(partitioner, declared, layout)


def may_hold_rows(size: Any, layout: Sharded) -> bool:
    """Whether a size of a declared shape admits rows."""
    return size is not UNKNOWN and size in (-1, layout.size)
