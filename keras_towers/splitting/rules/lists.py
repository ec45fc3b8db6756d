"""Lists of tensors, which loops use: all elements are alike.

The value of a list is that of its elements. Where they are the examples of
the batch, one after the other, the axis of examples is -1. Its ``items`` are
the number of its elements, if it is known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.splitting.joining import joined, nothing
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import inserted, rows_of, rule
from keras_towers.splitting.sizes import EXAMPLES
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Value,
)


@rule("TensorListReserve", "EmptyTensorList")
def _empty(node: Node, shape: Value, count: Value) -> Value:
    if not count.is_same:
        raise NotFollowed("makes a list of a length that follows from the data")
    if node.type == "EmptyTensorList":
        return _with_length(nothing(), 0)
    number = None if count.known is None else count.known.flat[0]
    return _with_length(nothing(), number)


def _with_length(elements: Value, length: Any) -> Value:
    known = isinstance(length, int)
    return dataclasses.replace(elements, items=(length,) if known else ())


def _length(elements: Value) -> Any:
    """The number of elements, or None."""
    return elements.items[0] if elements.items else None


def _either(elements: Value, value: Value, more: int = 0) -> Value:
    """A list that has a value among its elements."""
    length = _length(elements)
    result = joined(_element_of(elements), value)
    return _with_length(result, None if length is None else length + more)


def _element_of(elements: Value) -> Value:
    return dataclasses.replace(elements, items=())


@rule("TensorListFromTensor")
def _elements(node: Node, value: Value, shape: Value) -> Value:
    rest = None if value.shape is None else value.shape[1:]
    length = None if value.shape is None else value.shape[0]
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return _with_length(value.with_(shape=rest), length)
    if rows_of(value).axis == 0:
        if rows_of(value).count > 1:
            raise DoesNotSplit("loops over the rows of examples")
        return value.moved(-1, shape=rest)
    moved = value.moved(rows_of(value).axis - 1, shape=rest)
    return _with_length(moved, length)


@rule("TensorListStack", "TensorListGather", "TensorListConcatV2")
def _stacked(node: Node, elements: Value, *options: Value) -> Value:
    if node.type == "TensorListConcatV2":
        raise DoesNotSplit("joins the elements of a list")
    if _of_examples(elements) and node.type != "TensorListStack":
        raise DoesNotSplit("picks examples of the batch from a list")
    if elements.kind is Kind.ROWS and rows_of(elements).axis < 0:
        shape = elements.shape
        return elements.moved(
            0, shape=None if shape is None else (EXAMPLES, *shape)
        )
    size: Any = _length(elements)
    if node.type == "TensorListGather":
        size = None if options[0].shape is None else options[0].shape[0]
    return inserted(_element_of(elements), 0, size)


@rule("TensorListGetItem")
def _element(node: Node, elements: Value, index: Value, shape: Value) -> Value:
    _check_index(index)
    loops = elements.rows is not None and elements.rows.axis < 0
    if loops and index.key != "round":
        raise DoesNotSplit("picks one example of the batch")
    return _element_of(elements)


@rule("TensorListSetItem")
def _set_element(
    node: Node, elements: Value, index: Value, value: Value
) -> Value:
    _check_index(index)
    if value.rows is not None and value.rows.axis < 0 and index.key != "round":
        raise DoesNotSplit("puts an example at another place")
    return _either(elements, value)


def _check_index(index: Value) -> None:
    if not index.is_same and (index.rows is None or index.rows.axis >= 0):
        raise DoesNotSplit("picks an element of a list by the batch")


@rule("TensorListPushBack")
def _pushed(node: Node, elements: Value, value: Value) -> Value:
    return _either(elements, value, more=1)


@rule("TensorListPopBack")
def _popped(node: Node, elements: Value, shape: Value) -> list[Value]:
    length = _length(elements)
    rest = None if length is None else length - 1
    return [_with_length(elements, rest), _element_of(elements)]


@rule("TensorListResize")
def _resized(node: Node, elements: Value, size: Value) -> Value:
    if not size.is_same or _of_examples(elements):
        raise NotFollowed("makes a list of a length that follows from the data")
    number = None if size.known is None else size.known.flat[0]
    # What is added is zero, which is anything.
    return _with_length(elements, number)


def _of_examples(elements: Value) -> bool:
    return elements.rows is not None and elements.rows.axis < 0
