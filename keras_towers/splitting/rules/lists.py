"""Lists of tensors, which loops use: all elements are alike.

The value of a list is that of its elements. Where they are the examples of
the batch, one after the other, the axis of examples is -1.
"""

from __future__ import annotations

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import inserted, rows_of, rule
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Value,
    joined,
    nothing,
)


@rule("TensorListReserve", "EmptyTensorList")
def _empty(node: Node, *options: Value) -> Value:
    return nothing()


@rule("TensorListFromTensor")
def _elements(node: Node, value: Value, shape: Value) -> Value:
    rest = None if value.shape is None else value.shape[1:]
    if value.kind is not Kind.ROWS:
        return value.with_(shape=rest)
    if rows_of(value).axis == 0:
        if rows_of(value).count > 1:
            raise DoesNotSplit("loops over the rows of examples")
        return value.moved(-1, shape=rest)
    return value.moved(rows_of(value).axis - 1, shape=rest)


@rule("TensorListStack", "TensorListGather", "TensorListConcatV2")
def _stacked(node: Node, elements: Value, *options: Value) -> Value:
    if node.type == "TensorListConcatV2":
        raise DoesNotSplit("joins the elements of a list")
    if elements.kind is Kind.ROWS and rows_of(elements).axis < 0:
        from keras_towers.splitting.sizes import EXAMPLES

        shape = elements.shape
        return elements.moved(
            0, shape=None if shape is None else (EXAMPLES, *shape)
        )
    static = node.static_shape()
    size = None if static is None else static[0]
    return inserted(elements, 0, size)


@rule("TensorListGetItem")
def _element(node: Node, elements: Value, index: Value, shape: Value) -> Value:
    _check_index(index)
    loops = elements.rows is not None and elements.rows.axis < 0
    if loops and index.key != "round":
        raise DoesNotSplit("picks one example of the batch")
    return elements


@rule("TensorListSetItem")
def _set_element(
    node: Node, elements: Value, index: Value, value: Value
) -> Value:
    _check_index(index)
    if value.rows is not None and value.rows.axis < 0 and index.key != "round":
        raise DoesNotSplit("puts an example at another place")
    return joined(elements, value)


def _check_index(index: Value) -> None:
    if not index.is_same and (index.rows is None or index.rows.axis >= 0):
        raise DoesNotSplit("picks an element of a list by the batch")


@rule("TensorListPushBack")
def _pushed(node: Node, elements: Value, value: Value) -> Value:
    return joined(elements, value)


@rule("TensorListPopBack")
def _popped(node: Node, elements: Value, shape: Value) -> list[Value]:
    return [elements, elements]


@rule("TensorListResize")
def _resized(node: Node, elements: Value, size: Value) -> Value:
    return elements
