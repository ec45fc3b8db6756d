"""Lists of tensors, which loops use: all elements are alike.

The value of a list is that of its elements. Its ``items`` are the number of its
elements, if it is known. Where the elements are the examples of the batch, one
after the other, or are to become them, they are as many as the examples, and
where they are known to follow from them, their axis of examples is -1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_towers.partition.sizes import EXAMPLES, UNKNOWN
from keras_towers.splitting.joining import joined, nothing
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import inserted, rows_of, rule
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    NotFollowed,
    Rows,
    Value,
    examples,
    of_known,
    same,
)


@rule("TensorListReserve", "EmptyTensorList", sizes=(0, 1))
def _empty(node: Node, shape: Value, count: Value) -> Value:
    if node.type == "EmptyTensorList":
        return _with_length(nothing(), 0)
    number = None if count.known is None else count.known.flat[0]
    if not count.is_same and number != EXAMPLES:
        raise NotFollowed("makes a list of a length that follows from the data")
    return _with_length(nothing(), number)


def _with_length(elements: Value, length: Any) -> Value:
    known = isinstance(length, int) or length == EXAMPLES
    return dataclasses.replace(elements, items=(length,) if known else ())


def _length(elements: Value) -> Any:
    """The number of elements, or None."""
    return elements.items[0] if elements.items else None


def _is_of_batch(elements: Value) -> bool:
    """Whether there is an element for each example."""
    return elements.items == (EXAMPLES,)


def _either(elements: Value, value: Value, more: int = 0) -> Value:
    """A list that has a value among its elements."""
    length = _length(elements)
    result = joined(_element_of(elements), value)
    return _with_length(result, None if length is None else length + more)


def _element_of(elements: Value) -> Value:
    return dataclasses.replace(elements, items=())


@rule("TensorListFromTensor", sizes=(1,))
def _elements(node: Node, value: Value, shape: Value) -> Value:
    rest = None if value.shape is None else value.shape[1:]
    length = None if value.shape is None else value.shape[0]
    if value.axis is None:
        return _with_length(value.with_(shape=rest), length)
    if value.axis == 0:
        if rows_of(value).count > 1 or rows_of(value).unit is not None:
            raise DoesNotSplit("loops over the rows of examples")
        length = EXAMPLES
    return _with_length(value.moved(value.axis - 1, shape=rest), length)


@rule("TensorListConcatV2")
def _concatenated(node: Node, *values: Value) -> Value:
    raise DoesNotSplit("joins the elements of a list")


@rule("TensorListStack", sizes=(1,))
def _stacked(node: Node, elements: Value, shape: Value) -> Value:
    if elements.kind is Kind.ROUND:
        raise DoesNotSplit("numbers the examples of the batch")
    if not _is_of_batch(elements):
        return inserted(_element_of(elements), 0, _length(elements))
    if elements.kind is not Kind.ROWS:
        raise NotFollowed("makes a list that rounds of no loop fill")
    size = None if elements.shape is None else (EXAMPLES, *elements.shape)
    return _element_of(elements).moved(0, shape=size)


@rule("TensorListGather")
def _picked(node: Node, elements: Value, places: Value, shape: Value) -> Value:
    if elements.kind is Kind.ROUND:
        raise DoesNotSplit("numbers the examples of the batch")
    if _is_of_batch(elements):
        raise DoesNotSplit("picks examples of the batch from a list")
    _check_index(places)
    size = None if places.shape is None else places.shape[0]
    return inserted(_element_of(elements), 0, size)


@rule("TensorListGetItem", sizes=(0, 1, 2))
def _element(node: Node, elements: Value, index: Value, shape: Value) -> Value:
    if index.kind is Kind.ROUND:
        if not _is_of_batch(elements):
            raise DoesNotSplit("picks an element by the number of an example")
    elif _is_of_batch(elements):
        raise DoesNotSplit("picks one example of the batch")
    else:
        _check_index(index)
    return _element_of(elements)


@rule("TensorListSetItem", sizes=(0, 1, 2))
def _set_element(
    node: Node, elements: Value, index: Value, value: Value
) -> Value:
    if index.kind is not Kind.ROUND:
        if _is_of_batch(elements):
            raise DoesNotSplit("puts an example at another place")
        _check_index(index)
        return _either(elements, value)
    if not _is_of_batch(elements):
        raise DoesNotSplit("puts an element where an example's number says")
    if value.kind is Kind.SAME:
        value = examples(Rows(-1), value.degree, shape=value.shape)
    if value.axis is not None:
        raise DoesNotSplit("gives every example all examples")
    return _either(elements, value)


def _check_index(index: Value) -> None:
    if not index.is_same:
        raise DoesNotSplit("picks an element of a list by the batch")


@rule("TensorListPushBack", sizes=(0, 1))
def _pushed(node: Node, elements: Value, value: Value) -> Value:
    if _is_of_batch(elements):
        raise NotFollowed("puts more into a list than there are examples")
    return _either(elements, value, more=1)


@rule("TensorListPopBack", sizes=(0, 1))
def _popped(node: Node, elements: Value, shape: Value) -> list[Value]:
    length = _length(elements)
    rest = length - 1 if isinstance(length, int) else None
    return [_with_length(elements, rest), _element_of(elements)]


@rule("TensorListResize")
def _resized(node: Node, elements: Value, size: Value) -> Value:
    if not size.is_same or _is_of_batch(elements):
        raise NotFollowed("makes a list of a length that follows from the data")
    number = None if size.known is None else size.known.flat[0]
    # What is added is zero, which is anything.
    return _with_length(elements, number)


@rule("TensorListElementShape")
def _element_shape(node: Node, elements: Value) -> Value:
    # A list may have been told less of its elements than is known here.
    if elements.grows and elements.shape is not None:
        return of_known([UNKNOWN] * len(elements.shape))
    return same()


@rule("TensorListLength")
def _known_length(node: Node, elements: Value) -> Value:
    if elements.items:
        return of_known(elements.items[0])
    if elements.rows is not None and elements.axis is None:
        raise NotFollowed("uses the length of a list that is not known")
    return same()
