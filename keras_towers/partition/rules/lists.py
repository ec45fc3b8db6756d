"""Lists of tensors, which loops use, and optional values, which branches do."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.called_functions import tensor_with_layout
from keras_towers.partition.layouts import (
    REPLICATED,
    ListOf,
    NotDivided,
    Sharded,
    Value,
    Values,
    local_shape,
    require,
)
from keras_towers.partition.list_elements import (
    Elements,
    are_rows,
    behind,
    elements_of,
    fits,
    joined_elements,
    one_more,
    shape_on_tower,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.registry import Node, notes, rule
from keras_towers.partition.sizes import UNKNOWN

# What operations take and return: a list, an element of one, several along a
# first axis, the shape of an element, and what all have.
_ROLES = {
    "EmptyTensorList": ("shape same", "list"),
    "TensorListReserve": ("shape same", "list"),
    "TensorListFromTensor": ("stack shape", "list"),
    "TensorListScatterV2": ("stack same shape same", "list"),
    "TensorListSetItem": ("list same item", "list"),
    "TensorListPushBack": ("list item", "list"),
    "TensorListPopBack": ("list shape", "list item"),
    "TensorListResize": ("list same", "list"),
    "TensorListGetItem": ("list same shape", "item"),
    "TensorListStack": ("list shape", "stack"),
    "TensorListGather": ("list same shape", "stack"),
    "TensorListConcatV2": ("list shape same", "item same"),
    "TensorListLength": ("list", "same"),
    "TensorListElementShape": ("list", "same"),
    "OptionalNone": ("", "list"),
    "OptionalFromValue": ("item", "list"),
    "OptionalGetValue": ("list", "item"),
    "OptionalHasValue": ("list", "same"),
}
# A tower may do these to lists of which the elements are rows.
_OF_ROWS = ("TensorListFromTensor", "TensorListStack", "AddN", "ZerosLike")


def _roles(node: Node, inputs: Values) -> tuple[Sequence[str], Sequence[str]]:
    """Return the roles of the inputs and outputs of an operation on lists."""
    if node.type in ("AddN", "ZerosLike"):
        require(node.output_dtype() == tf.variant)
        return ["list"] * len(inputs), ["list"]
    takes, gives = (roles.split() for roles in _ROLES[node.type])
    # An optional value may consist of several tensors.
    require((len(takes), len(gives)) == (len(inputs), node.num_outputs))
    return takes, gives


@notes("AddN", "ZerosLike")
def _note_added(node: Node, values: Values, outputs: Values) -> None:
    lists = [value.element for value in values]
    elements = functools.reduce(joined_elements, lists)
    if elements is None:
        return
    item = elements.item
    # What is set in one of them is set in their sum.
    outputs[0].element = dataclasses.replace(
        elements,
        item=item and dataclasses.replace(item, known=None),
        is_full=any(known is not None and known.is_full for known in lists),
        are_places=item is None,
    )


# ---- on towers ---------------------------------------------------------------


@rule(*_ROLES, "AddN", "ZerosLike")
def _list(node: Node, *inputs: Value) -> Values:
    partition = node.partition
    takes, gives = _roles(node, inputs)
    require(partition.options.lists or node.type not in _ROLES)
    require(not all(value.is_replicated for value in inputs))
    element = _element(takes, inputs)
    elements = inputs[0].element
    if node.type == "TensorListElementShape":
        return [_element_shape(node, elements_of(inputs[0]))]
    if node.type == "TensorListLength" and are_rows(element):
        size = partition.size(elements_of(inputs[0]).length)
        if size is None:
            raise NotDivided
        return [Value(REPLICATED, whole=partition.cast(size, tf.int32))]
    require(node.type in _OF_ROWS or not are_rows(element))
    if node.type == "TensorListConcatV2":
        # Of what is not set nobody knows how long it is.
        require(elements_of(inputs[0]).is_full)
        require(not isinstance(element, Sharded) or element.axis)
    operands = [
        _shape_given(node, value, element, elements)
        if role == "shape"
        else tensor_with_layout(partition, value, _layout(role, element))
        for role, value in zip(takes, inputs, strict=True)
    ]
    layouts = [_layout(role, element) for role in gives]
    attributes: dict[str, Any] = {}
    if node.type == "TensorListStack" and are_rows(element):
        attributes["num_elements"] = -1
    if node.type == "OptionalGetValue":
        attributes["output_shapes"] = [
            local_shape(shape, layout)
            for shape, layout in zip(node.shapes, layouts, strict=True)
        ]
    return node.on_towers(operands, *layouts, attributes=attributes)


def _element(takes: Sequence[str], inputs: Values) -> Any:
    """How the elements of a list are laid out that operations take or make."""
    pairs = list(zip(takes, inputs, strict=True))
    for role, value in pairs:
        if role == "list" and isinstance(value.layout, ListOf):
            return value.layout.element
    for role, value in pairs:
        layout: Any = value.layout
        if role == "item" and not value.is_replicated:
            return layout
        if role == "stack" and not value.is_replicated:
            if not isinstance(layout, Sharded):
                return layout
            if layout.axis > 0 or layout.count == 1:
                return layout.along(layout.axis - 1)
    raise NotDivided


def _layout(role: str, element: Any) -> Any:
    if role == "list":
        return ListOf(element)
    if role == "stack":
        return behind(element)
    return element if role == "item" else REPLICATED


def _shape_given(
    node: Node,
    shape: Value,
    layout: Any,
    elements: Elements | None,
) -> Tensor:
    """Return the shape of elements that an operation is given on towers.

    Args:
        partition: makes the operations.
        node: the operation.
        shape: what one device gives.
        layout: how the elements are laid out.
        elements: what is known of the list's elements.

    Raises:
        NotDivided: if that is not certain.
    """
    partition = node.partition
    sizes = _entries(shape)
    if are_rows(layout) and node.type == "TensorListStack":
        # A tower may have no elements, and has to know their shape.
        with contextlib.suppress(NotDivided):
            known = None if elements is None else elements.shape
            return shape_on_tower(partition, known)
        require(sizes is not None and -1 not in sizes)
        return shape_on_tower(partition, sizes)
    any_shape = shape.shape == () or not isinstance(layout, Sharded)
    if any_shape or are_rows(layout):
        return tensor_with_layout(partition, shape, REPLICATED)
    if sizes is None or not shape.is_replicated:
        raise NotDivided
    size = sizes[layout.axis]
    # Elements that were set have the rows, or one device would have failed.
    is_full = elements is not None and elements.is_full
    require(fits(size, layout) or (size is UNKNOWN and is_full))
    return partition.local_target(shape, sizes, layout)


def _entries(shape: Value) -> list[Any] | None:
    """The entries of a shape, unknown where they are not known."""
    if shape.known is not None:
        return list(shape.known) if np.ndim(shape.known) else None
    sizes = shape.shape
    if sizes == (0,):
        return []
    if not sizes or not isinstance(sizes[0], int):
        return None
    return [UNKNOWN] * sizes[0]


def _element_shape(node: Node, elements: Elements) -> Value:
    """The shape that the list of one device was declared to hold."""
    partition = node.partition
    require(elements.declared is not None)
    whole = shape_on_tower(partition, list(np.ravel(elements.declared)))
    if not np.ndim(elements.declared):
        whole = partition.entry(whole, 0)
    return Value(REPLICATED, whole=partition.cast(whole, node.output_dtype()))


# ---- what is known -----------------------------------------------------------


@notes(*_ROLES)
def _note(node: Node, inputs: Values, outputs: Values) -> None:
    """Note what is known of lists, and of what is taken out of them."""
    takes, gives = _roles(node, inputs)
    if gives[0] == "list":
        outputs[0].element = _after(node, inputs)
    if takes[:1] != ["list"]:
        return
    first, elements = outputs[0], elements_of(inputs[0])
    match node.type.removeprefix("TensorList"):
        case "PopBack" | "GetItem" | "OptionalGetValue":
            _describe(outputs[-1], elements, inputs[-1])
        case "Stack" | "Gather" as kind:
            sizes = _shape_of(elements, inputs[-1])
            count = (elements.length,) if kind == "Stack" else inputs[1].shape
            if sizes is not None and count:
                first.shape = (*count, *sizes)
        case "ConcatV2" if elements.shape and elements.is_full:
            first.shape = (UNKNOWN, *elements.shape[1:])
        case "Length" if elements.length is not UNKNOWN:
            first.known = np.asarray(elements.length, object)
        case "ElementShape" if elements.declared is not None:
            first.known = np.asarray(elements.declared, object)


def _after(node: Node, inputs: Values) -> Elements | None:
    """What is known of the elements of the list that an operation returns."""
    kind = node.type.removeprefix("TensorList")
    match kind:
        case "EmptyTensorList" | "Reserve":
            length = inputs[1].number if kind == "Reserve" else 0
            return _new(node, inputs[0], length, is_full=length == 0)
        case "FromTensor" | "ScatterV2" if inputs[0].shape:
            is_full = kind == "FromTensor"
            count, *sizes = inputs[0].shape
            return _new(
                node,
                inputs[1 if is_full else 2],
                count if is_full else UNKNOWN,
                item=Value(REPLICATED, shape=tuple(sizes)),
                is_full=is_full,
                are_places=False,
            )
        case "OptionalNone" | "OptionalFromValue":
            nothing = Elements(None, is_optional=True)
            return functools.reduce(one_more, inputs, nothing)
    elements = elements_of(inputs[0])
    length = elements.length
    match kind:
        case "PopBack":
            return dataclasses.replace(elements, length=length - 1)
        case "Resize":
            length = inputs[1].number
            return dataclasses.replace(elements, length=length, is_full=False)
    after = one_more(elements, inputs[-1])
    assert after is not None
    if kind == "PushBack":
        return dataclasses.replace(after, length=length + 1)
    if node.attr("resize_if_index_out_of_bounds"):
        return dataclasses.replace(after, length=UNKNOWN, is_full=False)
    return after


def _new(node: Node, shape: Value, length: Any, **known: Any) -> Elements:
    """What is known of the elements of a list that is made."""
    declared = None if shape.known is None else shape.known.tolist()
    return Elements(node.attr("element_dtype"), declared, length, **known)


def _describe(value: Value, elements: Elements, shape: Value) -> None:
    """Note what is known of an element that was taken out of a list."""
    value.shape = _shape_of(elements, shape)
    if elements.is_full and elements.item is not None:
        value.known = elements.item.known
        value.element = elements.item.element


def _shape_of(elements: Elements, shape: Value) -> Any:
    """The shape of an element that is taken out of a list, or None.

    Args:
        elements: what is known of those of the list.
        shape: what one device says of its shape.
    """
    sizes = elements.shape
    if sizes is None or elements.is_full:
        return sizes
    # Those that were not set are as large as the list, or this, says.
    declared = [
        _sizes_in(e, len(sizes)) for e in (elements.declared, shape.known)
    ]
    return tuple(
        size
        if all(t is not UNKNOWN and t in (-1, size) for t in said)
        else UNKNOWN
        for size, *said in zip(sizes, *declared, strict=True)
    )


def _sizes_in(entries: Any, rank: int) -> list[Any]:
    """The sizes that a shape gives, -1 for any."""
    if entries is None:
        return [UNKNOWN] * rank
    return list(entries) if np.ndim(entries) else [-1] * rank
