"""Lists of tensors, which loops use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.builder import NeedsExchange, attribute
from keras_towers.partition.functions import laid_out
from keras_towers.partition.layouts import (
    REPLICATED,
    Layout,
    ListOf,
    Partial,
    Sharded,
    Value,
)
from keras_towers.partition.lists import (
    Elements,
    fits,
    joined_elements,
    one_more,
    own_list,
)
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import (
    Partitioner,
    local_shape,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import AXES, rule
from keras_towers.partition.sizes import UNKNOWN

_MADE = Callable[..., "list[Value] | None"]


def _rule(*types: str) -> Callable[[_MADE], _MADE]:
    """Register a rule that is asked about all lists."""
    return rule(*types, always=True, of_lists=True)


def _element(value: Value) -> Any:
    """How the elements of a list are laid out."""
    layout = value.layout
    return layout.element if isinstance(layout, ListOf) else REPLICATED


def _are_rows(value: Value) -> bool:
    """Whether the elements of a list are rows, of which each tower has some."""
    element = _element(value)
    return isinstance(element, Sharded) and element.axis < 0


def _own_shape(
    partition: Partitioner,
    shape: Value,
    layout: Layout,
    elements: Elements | None = None,
) -> Tensor | None:
    """Return the shape of elements that an operation is given on towers.

    It is None if that is not certain.

    Args:
        partition: makes the operations.
        shape: what one device gives.
        layout: how the elements are laid out.
        elements: what is known of the list's elements.
    """
    if not isinstance(layout, Sharded) or layout.axis < 0 or shape.shape == ():
        return partition.local(shape) if shape.is_replicated else None
    sizes = _entries(shape)
    if sizes is None or not shape.is_replicated:
        return None
    size = sizes[layout.axis]
    # Elements that were set have the rows, or one device would have failed.
    is_full = elements is not None and elements.is_full
    if not fits(size, layout) and not (size is UNKNOWN and is_full):
        return None
    return partition.local_target(
        shape, [None if s is UNKNOWN else s for s in sizes], layout
    )


def _entries(shape: Value) -> list[Any] | None:
    """The entries of a shape, unknown where they are not known."""
    if shape.known is not None:
        return list(shape.known) if np.ndim(shape.known) else None
    sizes = shape.shape
    if not sizes or not isinstance(sizes[0], int):
        return None
    return [UNKNOWN] * sizes[0]


def _number(value: Value) -> Any:
    """What is known of a number, or None."""
    if value.known is None or np.size(value.known) != 1:
        return None
    number = np.ravel(value.known)[0]
    return None if number is UNKNOWN else number


def _more(length: Any, count: int) -> Any:
    """A length that is known, and some more, or None."""
    found = UNKNOWN if length is None else length + count
    return None if found is UNKNOWN else found


def _copy(
    partition: Partitioner,
    node: Node,
    given: Sequence[Tensor],
    layouts: Sequence[Layout],
    attributes: dict[str, Any] | None = None,
) -> list[Value]:
    """Have each tower do an operation."""
    shapes = [
        local_shape(shape, layout)
        for shape, layout in zip(node.shapes, layouts, strict=True)
    ]
    found = partition.builder.copy(node.operation, given, shapes, attributes)
    return [
        Value(layout, local)
        for layout, local in zip(layouts, found, strict=True)
    ]


def _done(
    partition: Partitioner, node: Node, inputs: Sequence[Value]
) -> list[Value] | None:
    """Have an operation computed once, if nothing is divided."""
    if all(value.is_replicated for value in inputs):
        return partition.computed_once(node, inputs)
    return None


# ---- lists are made ----------------------------------------------------------


@_rule("TensorListReserve", "EmptyTensorList")
def _empty(
    partition: Partitioner, node: Node, shape: Value, count: Value
) -> list[Value] | None:
    found = _done(partition, node, (shape, count))
    if found is not None:
        reserves = node.type == "TensorListReserve"
        length = _number(count) if reserves else 0
        found[0].element = Elements(
            node.attr("element_dtype"),
            shape.known,
            length,
            is_full=length == 0,
        )
    return found


@_rule("TensorListFromTensor")
def _from_tensor(
    partition: Partitioner, node: Node, value: Value, shape: Value
) -> list[Value] | None:
    if value.shape is None or not value.shape:
        return None
    length, *rest = value.shape
    layout = value.sharded
    found = _done(partition, node, (value, shape))
    if found is None:
        element: Any = value.layout
        if layout is not None:
            element = layout.along(layout.axis - 1)
            if layout.axis == 0 and layout.count != 1:
                return None
        told = _own_shape(partition, shape, element)
        if told is None or value.local is None:
            return None
        found = _copy(partition, node, [value.local, told], [ListOf(element)])
    found[0].element = Elements(
        node.attr("element_dtype"),
        shape.known,
        length,
        tuple(rest),
        is_empty=False,
    )
    return found


@_rule("TensorListScatterV2")
def _scattered(
    partition: Partitioner,
    node: Node,
    value: Value,
    places: Value,
    shape: Value,
    count: Value,
) -> list[Value] | None:
    others = (places, shape, count)
    if value.shape is None or not value.shape:
        return None
    found = _done(partition, node, (value, *others))
    if found is None:
        layout = value.layout
        if isinstance(layout, Sharded):
            layout = layout.along(layout.axis - 1)
        if isinstance(layout, Sharded) and layout.axis < 0:
            return None
        if not all(v.is_replicated for v in others) or value.local is None:
            return None
        told = _own_shape(partition, shape, layout)
        if told is None or not isinstance(layout, Sharded | Partial):
            return None
        rest = [partition.local(places), told, partition.local(count)]
        found = _copy(partition, node, [value.local, *rest], [ListOf(layout)])
    found[0].element = Elements(
        node.attr("element_dtype"),
        shape.known,
        shape=tuple(value.shape[1:]),
        is_empty=False,
        is_full=False,
    )
    return found


# ---- lists change ------------------------------------------------------------


def _with_item(value: Value, item: Value) -> ListOf | None:
    """How a list is laid out that gets an element; None: as no list can be."""
    if isinstance(value.layout, ListOf):
        return value.layout
    layout = item.layout
    if not value.is_replicated or not isinstance(
        layout, Sharded | Partial | ListOf
    ):
        return None
    return ListOf(layout)


def _given(
    partition: Partitioner, value: Value, item: Value
) -> tuple[ListOf, list[Tensor]] | None:
    """How a list is laid out that gets an element, and what towers have."""
    layout = _with_item(value, item)
    if layout is None or _are_rows(value):
        return None
    own = own_list(partition, value, layout)
    if own is None:
        return None
    try:
        return layout, [own, laid_out(partition, item, layout.element)]
    except NeedsExchange:
        return None


@_rule("TensorListSetItem")
def _set(
    partition: Partitioner, node: Node, value: Value, place: Value, item: Value
) -> list[Value] | None:
    found = _done(partition, node, (value, place, item))
    if found is None:
        given = _given(partition, value, item)
        if given is None or not place.is_replicated:
            return None
        layout, (own, element) = given
        inputs = [own, partition.local(place), element]
        found = _copy(partition, node, inputs, [layout])
    elements = one_more(value.element, item)
    if elements is not None and _resizes(node):
        elements = dataclasses.replace(elements, length=None, is_full=False)
    found[0].element = elements
    return found


def _resizes(node: Node) -> bool:
    name = "resize_if_index_out_of_bounds"
    attributes = node.operation.node_def.attr
    return name in attributes and attributes[name].b


@_rule("TensorListPushBack")
def _pushed(
    partition: Partitioner, node: Node, value: Value, item: Value
) -> list[Value] | None:
    found = _done(partition, node, (value, item))
    if found is None:
        given = _given(partition, value, item)
        if given is None:
            return None
        layout, inputs = given
        found = _copy(partition, node, inputs, [layout])
    elements = one_more(value.element, item)
    if elements is not None:
        elements = dataclasses.replace(
            elements, length=_more(elements.length, 1)
        )
    found[0].element = elements
    return found


@_rule("TensorListPopBack")
def _popped(
    partition: Partitioner, node: Node, value: Value, shape: Value
) -> list[Value] | None:
    elements = value.element
    found = _done(partition, node, (value, shape))
    if found is None:
        if _are_rows(value):
            return None
        own = _own_shape(partition, shape, _element(value), elements)
        if own is None or value.local is None:
            return None
        layouts = [value.layout, _element(value)]
        found = _copy(partition, node, [value.local, own], layouts)
    if elements is not None:
        length = _more(elements.length, -1)
        found[0].element = dataclasses.replace(elements, length=length)
        _describe(found[1], elements, shape)
    return found


@_rule("TensorListResize")
def _resized(
    partition: Partitioner, node: Node, value: Value, size: Value
) -> list[Value] | None:
    found = _done(partition, node, (value, size))
    if found is None:
        if _are_rows(value) or not size.is_replicated or value.local is None:
            return None
        given = [value.local, partition.local(size)]
        found = _copy(partition, node, given, [value.layout])
    if value.element is not None:
        found[0].element = dataclasses.replace(
            value.element, length=_number(size), is_full=False
        )
    return found


@rule("AddN", "ZerosLike", always=True)
def _added(
    partition: Partitioner, node: Node, *values: Value
) -> list[Value] | None:
    if node.output_dtype(0) != tf.variant:
        factors = AXES[node.type](node, *values)
        if factors is None:
            return None
        return partition.divided(node, values, factors)
    layouts = {v.layout for v in values if isinstance(v.layout, ListOf)}
    if not all(v.is_replicated for v in values) and len(layouts) != 1:
        return None
    found = _done(partition, node, values)
    if found is None:
        (layout,) = layouts
        given = [own_list(partition, value, layout) for value in values]
        own = [tensor for tensor in given if tensor is not None]
        if len(own) < len(given):
            return None
        found = _copy(partition, node, own, [layout])
    elements = values[0].element
    for value in values[1:]:
        elements = joined_elements(elements, value.element)
    if elements is not None:
        # What is set in one of them is set in their sum.
        any_full = any(v.element and v.element.is_full for v in values)
        elements = dataclasses.replace(
            elements, known=None, is_full=any_full, are_places=False
        )
    found[0].element = elements
    return found


# ---- what lists have ---------------------------------------------------------


def _describe(value: Value, elements: Elements | None, shape: Value) -> None:
    """Note what is known of an element that was taken out of a list."""
    value.shape = _shape_of(elements, shape)
    if elements is not None and elements.is_full and not elements.is_empty:
        value.known, value.element = elements.known, elements.element


def _shape_of(elements: Elements | None, shape: Value) -> Any:
    """The shape of an element that is taken out of a list, or None.

    Args:
        elements: what is known of those of the list.
        shape: what one device says of its shape.
    """
    if elements is None or elements.is_empty or elements.shape is None:
        return None
    if elements.is_full:
        return elements.shape
    # Those that were not set are as large as the list, or this, says.
    told = [_each(e, len(elements.shape)) for e in (elements.told, shape.known)]
    return tuple(
        size if all(t is not UNKNOWN and t in (-1, size) for t in own) else None
        for size, *own in zip(elements.shape, *told, strict=True)
    )


def _each(entries: Any, rank: int) -> list[Any]:
    """The sizes that a shape gives, -1 for any."""
    if entries is None:
        return [UNKNOWN] * rank
    return list(entries) if np.ndim(entries) else [-1] * rank


@_rule("TensorListGetItem")
def _taken(
    partition: Partitioner, node: Node, value: Value, place: Value, shape: Value
) -> list[Value] | None:
    elements = value.element
    found = _done(partition, node, (value, place, shape))
    if found is None:
        if _are_rows(value) or not place.is_replicated or value.local is None:
            return None
        own = _own_shape(partition, shape, _element(value), elements)
        if own is None:
            return None
        given = [value.local, partition.local(place), own]
        found = _copy(partition, node, given, [_element(value)])
    _describe(found[0], elements, shape)
    return found


@_rule("TensorListStack")
def _stacked(
    partition: Partitioner, node: Node, value: Value, shape: Value
) -> list[Value] | None:
    found = _done(partition, node, (value, shape))
    elements = value.element
    if found is None:
        own = _full_shape(partition, value, shape)
        if own is None or value.local is None:
            return None
        layout, attributes = _element(value), {}
        if isinstance(layout, Sharded):
            layout = layout.along(layout.axis + 1)
        if _are_rows(value):
            attributes["num_elements"] = attribute(-1)
        given = [value.local, own]
        found = _copy(partition, node, given, [layout], attributes)
    sizes = _shape_of(elements, shape)
    if elements is not None and sizes is not None:
        found[0].shape = (elements.length, *sizes)
    return found


def _full_shape(
    partition: Partitioner, value: Value, shape: Value
) -> Tensor | None:
    """The shape that each tower stacks elements of; None: it is not certain."""
    elements, layout = value.element, _element(value)
    if not _are_rows(value):
        return _own_shape(partition, shape, layout, elements)
    # A tower may have no elements, and has to know their shape.
    sizes = _entries(shape)
    if not sizes and shape.shape != (0,):
        sizes = None
    if elements is not None and elements.shape is not None:
        own = sizes or [UNKNOWN] * len(elements.shape)
        sizes = [
            known if size is UNKNOWN or size == -1 else size
            for size, known in zip(own, elements.shape, strict=True)
        ]
    found = [
        None if size in (None, -1) or size is UNKNOWN else partition.size(size)
        for size in sizes or ()
    ]
    tensors = [size for size in found if size is not None]
    if sizes is None or len(tensors) < len(found):
        return None
    return partition.vector(tensors, tf.int32)


@_rule("TensorListGather")
def _picked(
    partition: Partitioner,
    node: Node,
    value: Value,
    places: Value,
    shape: Value,
) -> list[Value] | None:
    found = _done(partition, node, (value, places, shape))
    elements = value.element
    if found is None:
        if _are_rows(value) or not places.is_replicated:
            return None
        layout = _element(value)
        own = _own_shape(partition, shape, layout, elements)
        if own is None or value.local is None:
            return None
        if isinstance(layout, Sharded):
            layout = layout.along(layout.axis + 1)
        given = [value.local, partition.local(places), own]
        found = _copy(partition, node, given, [layout])
    sizes = _shape_of(elements, shape)
    if sizes is not None and places.shape:
        found[0].shape = (*places.shape, *sizes)
    return found


@_rule("TensorListConcatV2")
def _concatenated(
    partition: Partitioner,
    node: Node,
    value: Value,
    shape: Value,
    sizes: Value,
) -> list[Value] | None:
    layout, elements = _element(value), value.element
    done = _done(partition, node, (value, shape, sizes))
    if done is not None:
        return done
    if not sizes.is_replicated or value.local is None or elements is None:
        return None
    if isinstance(layout, Sharded) and layout.axis < 1:
        return None
    # Of what is not set nobody knows how long it is.
    own = _own_shape(partition, shape, layout, elements)
    if own is None or not elements.is_full:
        return None
    given = [value.local, own, partition.local(sizes)]
    found = _copy(partition, node, given, [layout, REPLICATED])
    if elements.shape is not None:
        found[0].shape = (None, *elements.shape[1:])
    return found


@_rule("TensorListLength")
def _lengths(
    partition: Partitioner, node: Node, value: Value
) -> list[Value] | None:
    length = None if value.element is None else value.element.length
    found = _done(partition, node, (value,))
    if found is None and _are_rows(value):
        size = partition.size(length)
        if size is None:
            return None
        found = [Value(REPLICATED, whole=partition.cast(size, tf.int32))]
    if found is None:
        assert value.local is not None
        found = _copy(partition, node, [value.local], [REPLICATED])
    if length is not None:
        found[0].known = np.asarray(length, object)
    return found


@_rule("TensorListElementShape")
def _element_shape(
    partition: Partitioner, node: Node, value: Value
) -> list[Value] | None:
    told = None if value.element is None else value.element.told
    found = _done(partition, node, (value,))
    if found is None:
        if told is None:
            return None
        sizes = [partition.size(size) for size in np.ravel(told)]
        entries = [size for size in sizes if size is not None]
        if len(entries) < len(sizes):
            return None
        dtype = node.output_dtype(0)
        whole = (
            partition.vector(entries, dtype)
            if np.ndim(told)
            else partition.cast(entries[0], dtype)
        )
        found = [Value(REPLICATED, whole=whole)]
    found[0].known = told
    return found
