"""Converts lists of tensors to the layouts that operations need.

A tower without rows has lists of one row: XLA compiles rounds that never run,
and they take an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    Elements,
    ListOf,
    Partial,
    Sharded,
    Value,
    require,
    unless_none,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.sizes import UNKNOWN

if TYPE_CHECKING:
    from keras_towers.partition.conversions import Converter


def local_list(converter: Converter, value: Value, layout: ListOf) -> Tensor:
    """Return the local list of a list on every tower.

    Raises:
        NotDivided: the list cannot have this layout.
    """
    if value.layout == layout:
        return unless_none(value.local)
    require(value.is_replicated)
    elements, element = unless_none(value.elements), layout.element
    handle = converter.replicate(value)
    if _is_empty_optional(elements):
        return handle
    declared = _declared_shape(converter, elements, element)
    if elements.item is None:
        made_by = handle.operation
        if made_by is not None and made_by.type == "EmptyTensorList":
            # XLA needs to know how many elements it may get.
            _, most = made_by.inputs
            return converter.op(
                "EmptyTensorList",
                [declared, most],
                (),
                element_dtype=elements.dtype,
            )
        if is_row_per_element(element):
            length = converter.cast(
                converter.least_one(element.unit.count), tf.int32
            )
        else:
            length = converter.op("TensorListLength", [handle], ())
        return converter.op(
            "TensorListReserve",
            [declared, length],
            (),
            element_dtype=elements.dtype,
        )
    require(elements.is_full and not isinstance(element, ListOf))
    whole = _stacked(converter, handle, elements)
    if isinstance(element, Partial):
        rows = converter.to_partial(whole)
    else:
        rows = converter.shard(whole, stacked_layout(element))
    if is_row_per_element(element):
        rows = converter.pad_empty(rows, stacked_layout(element))
    return converter.op("TensorListFromTensor", [rows, declared], ())


def gather_list(converter: Converter, value: Value) -> Tensor:
    """Return the whole list, gathered from all towers.

    Raises:
        NotDivided: the facts do not suffice to gather it.
    """
    elements = unless_none(value.elements)
    element = cast("ListOf", value.layout).element
    # Lists of lists stay where they are.
    require(not isinstance(element, ListOf))
    require(elements.dtype != tf.variant)
    declared = _declared_shape(converter, elements, PARTIAL)
    rows = _stacked(converter, value.local, elements, element)
    whole = converter.assemble(rows)
    return converter.op("TensorListFromTensor", [whole, declared], ())


def _stacked(
    converter: Converter,
    handle: Any,
    elements: Elements,
    layout: Any = REPLICATED,
) -> Value:
    """Return the stack of the elements of a list with a layout."""
    # TensorFlow needs the full shape if a tower has no elements.
    sizes = element_shape(converter, elements.shape, layout)
    stacked = converter.op(
        "TensorListStack", [handle, sizes], element_dtype=elements.dtype
    )
    shape = (elements.length, *(elements.shape or ()))
    rows = stacked_layout(layout)
    if is_row_per_element(layout):
        stacked = converter.drop_padding(stacked, shape, rows)
    return Value(rows, stacked, shape=shape)


def element_shape(
    converter: Converter, shape: Sequence[Any] | None, layout: Any = None
) -> Tensor:
    """Return the local shape of the elements of a list.

    Args:
        shape: the global shape.
        layout: the layout of the elements.

    Raises:
        NotDivided: the shape is not known completely.
    """
    sizes = [converter.global_size(size) for size in unless_none(shape)]
    if isinstance(layout, Sharded) and 0 <= layout.axis < len(sizes):
        sizes[layout.axis] = converter.local_rows(layout)
    return converter.size_vector([*map(unless_none, sizes)], tf.int32)


def _declared_shape(
    converter: Converter, elements: Elements, layout: Any
) -> Tensor:
    """Return the shape that the local list declares for its elements."""
    declared = elements.declared
    if declared is not None and not np.ndim(declared):
        return converter.constant(-1, tf.int32)
    has_rows = isinstance(layout, Sharded) and layout.axis >= 0
    if declared and has_rows:
        require(may_hold_rows(declared[layout.axis], layout))
    return element_shape(converter, declared, layout)


def _is_empty_optional(elements: Elements) -> bool:
    """Whether it is an optional value without an element, however nested."""
    if elements.item is None:
        return elements.is_optional
    inner = elements.item.elements
    return inner is not None and _is_empty_optional(inner)


def is_row_per_element(element: Any) -> TypeGuard[Sharded]:
    """Whether each element of a list is a row."""
    return isinstance(element, Sharded) and element.axis < 0


def stacked_layout(element: Any) -> Any:
    """Return the layout of a stack of elements."""
    if isinstance(element, Sharded):
        return element.at_axis(element.axis + 1)
    return element


def may_hold_rows(size: Any, layout: Sharded) -> bool:
    """Whether a size of a declared shape admits rows."""
    return size is not UNKNOWN and size in (-1, layout.size)
