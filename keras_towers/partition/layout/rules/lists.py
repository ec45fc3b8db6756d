"""Lists of tensors in loops, and optional values in branches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.layouts import (
    REPLICATED,
    Layout,
    ListOf,
    Shape,
    Sharded,
    is_row_per_element,
    may_hold_rows,
    stacked_layout,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import NotDivided, require, unless_none
from keras_towers.partition.ir.registry import operation
from keras_towers.partition.ir.sizes import UNKNOWN, Dimension
from keras_towers.partition.ir.values import (
    Elements,
    Value,
    Values,
    common_elements,
)
from keras_towers.partition.layout.nodes import Node

# Operations on lists of rows that a tower may run on its own rows.
_OF_ROWS = ("TensorListFromTensor", "TensorListStack", "AddN", "ZerosLike")


def add_lists(node: Node, *lists: Value) -> Values:
    """Lay out a sum of two lists, or a list of zeros like another one."""
    require(node.output_dtype() == tf.variant)
    return _lay_out(["list"] * len(lists), ["list"], node, *lists)


def note_sum(node: Node, values: Values, outputs: Values) -> None:
    """Note the facts that hold for a sum of lists."""
    lists = [value.elements for value in values]
    elements = functools.reduce(common_elements, lists)
    if elements is None:
        return
    item = elements.item
    # An element that is set in one list is set in the sum.
    outputs[0].elements = dataclasses.replace(
        elements,
        item=item and dataclasses.replace(item, known=None),
        is_full=any(known is not None and known.is_full for known in lists),
        are_row_numbers=item is None,
    )


# ---- layouts -----------------------------------------------------------------


def _lay_out(
    takes: Sequence[str], gives: Sequence[str], node: Node, *inputs: Value
) -> Values:
    """Lay out an operation with inputs and outputs of these roles."""
    units = node.units
    # An optional value may consist of several tensors.
    require((len(takes), len(gives)) == (len(inputs), node.num_outputs))
    require(
        node.options.lists and not all(value.is_replicated for value in inputs)
    )
    element = _element_layout(takes, inputs)
    elements = inputs[0].elements
    if node.type == "TensorListElementShape":
        declared = unless_none(unless_none(inputs[0].elements).declared)
        whole = units.known_tensor(declared, node.output_dtype())
        return [Value(REPLICATED, whole=unless_none(whole))]
    if node.type == "TensorListLength" and is_row_per_element(element):
        length = unless_none(inputs[0].elements).length
        whole = unless_none(units.known_tensor(length, tf.int32))
        return [Value(REPLICATED, whole=whole)]
    require(node.type in _OF_ROWS or not is_row_per_element(element))
    if node.type == "TensorListConcatV2":
        # The sizes of elements that are not set are unknown.
        require(unless_none(inputs[0].elements).is_full)
        require(not isinstance(element, Sharded) or element.axis)
    operands = [
        _element_shape_operand(node, value, element, elements)
        if role == "shape"
        else node.converter.to_layout(value, _layout_of_role(role, element))
        for role, value in zip(takes, inputs, strict=True)
    ]
    layouts = [_layout_of_role(role, element) for role in gives]
    attributes: dict[str, object] = {}
    is_of_rows = is_row_per_element(element)
    if node.type == "TensorListFromTensor" and is_of_rows:
        operands[0] = units.pad_empty(operands[0], stacked_layout(element))
    if node.type == "TensorListStack" and is_of_rows:
        attributes["num_elements"] = -1
    outputs = node.run_on_towers(operands, *layouts, attributes=attributes)
    if node.type == "TensorListStack" and is_of_rows:
        (stack,) = outputs
        taken = _shape_of(unless_none(elements), inputs[1]) or inputs[1].entries
        stack.local = units.drop_padding(
            stack.own, [None, *taken], stacked_layout(element)
        )
    return outputs


def _element_layout(takes: Sequence[str], inputs: Values) -> Any:
    """Return the layout of the elements that an operation takes or returns."""
    pairs = list(zip(takes, inputs, strict=True))
    for role, value in pairs:
        if role == "list" and isinstance(value.layout, ListOf):
            return value.layout.element
    for role, value in pairs:
        layout = value.layout
        if role == "item" and not value.is_replicated:
            return layout
        if role == "stack" and not value.is_replicated:
            if not isinstance(layout, Sharded):
                return layout
            if layout.axis > 0 or layout.rows_per_unit == 1:
                return layout.at_axis(layout.axis - 1)
    raise NotDivided


def _layout_of_role(role: str, element: Any) -> Layout:
    if role == "list":
        return ListOf(element)
    if role == "stack":
        return stacked_layout(element)
    return element if role == "item" else REPLICATED


def _element_shape_operand(
    node: Node, shape: Value, layout: Layout, elements: Elements | None
) -> Tensor:
    """Return the local operand for the shape of elements.

    Args:
        node: the operation.
        shape: the global shape.
        layout: the layout of the elements.
        elements: the facts about the elements, if any are known.

    Raises:
        NotDivided: the local shape is not certain.
    """
    converter = node.converter
    if is_row_per_element(layout) and node.type == "TensorListStack":
        # A tower without elements needs their full shape.
        with contextlib.suppress(NotDivided):
            known = None if elements is None else elements.shape
            return converter.element_shape(known)
        require(-1 not in shape.entries)
        return converter.element_shape(shape.entries)
    any_shape = shape.shape == () or not isinstance(layout, Sharded)
    if any_shape or is_row_per_element(layout):
        return converter.to_layout(shape, REPLICATED)
    assert isinstance(layout, Sharded)
    require(shape.is_replicated)
    sizes = shape.entries
    size = sizes[layout.axis]
    # Elements that were set have the rows, or one device would have failed.
    is_full = elements is not None and elements.is_full
    require(may_hold_rows(size, layout) or (size is UNKNOWN and is_full))
    return converter.local_target(shape, sizes, layout)


# ---- facts -------------------------------------------------------------------


def _note_elements(
    takes: Sequence[str],
    gives: Sequence[str],
    node: Node,
    inputs: Values,
    outputs: Values,
) -> None:
    """Note the facts about lists, and about elements taken from them."""
    require(len(takes) == len(inputs) and len(gives) == len(outputs))
    if gives[0] == "list":
        outputs[0].elements = _facts_after(node, inputs)
    if takes[:1] != ["list"]:
        return
    first, elements = outputs[0], unless_none(inputs[0].elements)
    match node.type.removeprefix("TensorList"):
        case "PopBack" | "GetItem" | "OptionalGetValue":
            taken = outputs[-1]
            taken.shape = _shape_of(elements, inputs[-1])
            if elements.is_full and elements.item is not None:
                taken.known = elements.item.known
                taken.elements = elements.item.elements
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


def _facts_after(node: Node, inputs: Values) -> Elements | None:
    """Return the facts about the list that an operation returns."""
    kind = node.type.removeprefix("TensorList")
    match kind:
        case "EmptyTensorList" | "Reserve":
            length = inputs[1].number if kind == "Reserve" else 0
            return _facts_of_new_list(
                node, inputs[0], length, is_full=length == 0
            )
        case "FromTensor" | "ScatterV2" if inputs[0].shape:
            is_full = kind == "FromTensor"
            count, *sizes = inputs[0].shape
            return _facts_of_new_list(
                node,
                inputs[1 if is_full else 2],
                count if is_full else UNKNOWN,
                item=Value(REPLICATED, shape=tuple(sizes)),
                is_full=is_full,
                are_row_numbers=False,
            )
        case "OptionalNone" | "OptionalFromValue":
            option = Elements(None, length=1, is_optional=True)
            return option.with_item(inputs[0]) if inputs else option
    elements = unless_none(inputs[0].elements)
    length = elements.length
    match kind:
        case "PopBack":
            return dataclasses.replace(elements, length=length - 1)
        case "Resize":
            length = inputs[1].number
            return dataclasses.replace(elements, length=length, is_full=False)
    after = elements.with_item(inputs[-1])
    if kind == "PushBack":
        return dataclasses.replace(after, length=length + 1)
    if node.attr("resize_if_index_out_of_bounds"):
        return dataclasses.replace(after, length=UNKNOWN, is_full=False)
    return after


def _facts_of_new_list(
    node: Node, shape: Value, length: Dimension, **known: Any
) -> Elements:
    """Return the facts about the elements of a new list."""
    declared = None if shape.known is None else shape.known.tolist()
    return Elements(node.attr("element_dtype"), declared, length, **known)


def _shape_of(elements: Elements, shape: Value) -> Shape | None:
    """Return the shape of an element taken from a list, or None.

    Args:
        elements: the facts about the elements.
        shape: the shape that the operation is given.
    """
    sizes = elements.shape
    if sizes is None or elements.is_full:
        return sizes
    # An element that was not set has the declared shape, or this one.
    declared = [
        _sizes_in(entries, len(sizes))
        for entries in (elements.declared, shape.known)
    ]
    return tuple(
        size
        if all(d is not UNKNOWN and d in (-1, size) for d in declared_sizes)
        else UNKNOWN
        for size, *declared_sizes in zip(sizes, *declared, strict=True)
    )


def _sizes_in(entries: Any, rank: int) -> list[Dimension]:
    """Return the sizes of a declared shape; -1 stands for any size."""
    if entries is None:
        return [UNKNOWN] * rank
    return list(entries) if np.ndim(entries) else [-1] * rank


# ---- what is known of them ---------------------------------------------------


def _on_lists(types: str, takes: str, gives: str, **facts: Any) -> None:
    """Register operations on lists.

    Args:
        types: their types.
        takes: the role of each input: a list, one of its elements, a stack of
            elements, the shape of an element, or a replicated tensor.
        gives: the role of each output.
        **facts: other attributes of ``OperationFacts``.
    """
    roles = takes.split(), gives.split()
    note = functools.partial(_note_elements, *roles)
    rule = functools.partial(_lay_out, *roles)
    operation(types, rule, notes=[note], **facts)


_on_lists("EmptyTensorList TensorListReserve", "shape same", "list")
_on_lists("TensorListFromTensor", "stack shape", "list", memory="input")
_on_lists("TensorListScatterV2", "stack same shape same", "list")
_on_lists("TensorListSetItem", "list same item", "list")
_on_lists("TensorListPushBack", "list item", "list")
_on_lists("TensorListPopBack", "list shape", "list item")
_on_lists("TensorListResize", "list same", "list")
_on_lists("TensorListGetItem", "list same shape", "item")
_on_lists("TensorListStack", "list shape", "stack")
_on_lists("TensorListGather", "list same shape", "stack")
_on_lists("TensorListConcatV2", "list shape same", "item same")
_on_lists("TensorListLength TensorListElementShape", "list", "same")
_on_lists("OptionalNone", "", "list")
_on_lists("OptionalFromValue", "item", "list")
_on_lists("OptionalGetValue", "list", "item")
_on_lists("OptionalHasValue", "list", "same")
