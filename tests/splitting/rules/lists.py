"""Lists of tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.splitting.rules.case import Case, floats

raw = tf.raw_ops


def _list(x: Any) -> Any:
    shape = tf.constant([-1] * (x.shape.rank - 1))
    return raw.TensorListFromTensor(tensor=x, element_shape=shape)


def _any(x: Any) -> Any:
    return tf.constant([-1] * x.shape.rank)


def _stack(elements: Any, rank: int) -> Any:
    return raw.TensorListStack(
        input_handle=elements,
        element_shape=tf.constant([-1] * rank),
        element_dtype=tf.float32,
    )


def _item(elements: Any, index: Any, rank: int) -> Any:
    return raw.TensorListGetItem(
        input_handle=elements,
        index=index,
        element_shape=tf.constant([-1] * rank),
        element_dtype=tf.float32,
    )


def _reserved(x: Any, count: Any) -> Any:
    return raw.TensorListReserve(
        element_shape=_any(x), num_elements=count, element_dtype=tf.float32
    )


def _set(elements: Any, index: Any, x: Any) -> Any:
    return raw.TensorListSetItem(input_handle=elements, index=index, item=x)


def _pushed(x: Any, y: Any) -> Any:
    elements = raw.EmptyTensorList(
        element_shape=_any(x), max_num_elements=-1, element_dtype=tf.float32
    )
    for item in (x, y):
        elements = raw.TensorListPushBack(input_handle=elements, tensor=item)
    return elements


CASES = [
    Case(
        "TensorListFromTensor",
        lambda x: _stack(_list(x), 2),
        floats("abc"),
        "abc",
    ),
    Case(
        "TensorListStack", lambda x: _stack(_list(x), 2), floats("abc"), "abc"
    ),
    Case(
        "TensorListGetItem",
        lambda x: _item(_list(x), 1, 2),
        floats("bac"),
        "ac",
        {"b": "one example"},
    ),
    Case(
        "TensorListSetItem",
        lambda x, y: _stack(_set(_set(_reserved(x, 2), 0, x), 1, y), 2),
        floats("ab", "ab"),
        "ab",
    ),
    Case(
        "TensorListReserve",
        lambda x: tf.reduce_sum(_stack(_set(_reserved(x, 3), 0, x), 2), 0),
        floats("ab"),
        "ab",
    ),
    Case(
        "TensorListReserve",
        lambda x, y: tf.reduce_mean(
            _stack(_set(_reserved(x, 1 + tf.shape(y)[0]), 0, x), 2), 0
        ),
        floats("ab", "e"),
        letters="e",
        note="by n",
    ),
    Case(
        "EmptyTensorList",
        lambda x, y: _stack(_pushed(x, y), 2),
        floats("ab", "ab"),
        "ab",
    ),
    Case(
        "TensorListPushBack",
        lambda x, y: _stack(_pushed(x, y), 2),
        floats("ab", "ab"),
        "ab",
    ),
    Case(
        "TensorListPopBack",
        lambda x, y: raw.TensorListPopBack(
            input_handle=_pushed(x, y),
            element_shape=_any(x),
            element_dtype=tf.float32,
        )[1],
        floats("ab", "ab"),
        "ab",
    ),
    Case(
        "TensorListGather",
        lambda x, y: raw.TensorListGather(
            input_handle=_pushed(x, y),
            indices=[1, 0, 1],
            element_shape=_any(x),
            element_dtype=tf.float32,
        ),
        floats("ab", "ab"),
        "ab",
    ),
    Case(
        "TensorListGather",
        lambda x: raw.TensorListGather(
            input_handle=_list(x),
            indices=tf.range(tf.shape(x)[0])[::-1],
            element_shape=tf.constant([-1]),
            element_dtype=tf.float32,
        ),
        floats("eb"),
        letters="e",
        note="reversed",
    ),
    Case(
        "TensorListConcatV2",
        lambda x, y: raw.TensorListConcatV2(
            input_handle=_pushed(x, y),
            element_shape=_any(x),
            leading_dims=tf.constant([], tf.int64),
            element_dtype=tf.float32,
        )[0],
        floats("ab", "ab"),
    ),
    Case(
        "TensorListResize",
        lambda x: tf.reduce_sum(
            _stack(raw.TensorListResize(input_handle=_list(x), size=4), 1), 0
        ),
        floats("db"),
        letters="b",
    ),
    Case(
        "TensorListResize",
        lambda x, y: tf.reduce_mean(
            _stack(
                raw.TensorListResize(
                    input_handle=_pushed(x, x), size=2 + tf.shape(y)[0]
                ),
                2,
            )
        ),
        floats("ab", "e"),
        letters="e",
        note="by n",
    ),
    Case(
        "TensorListLength",
        lambda x: raw.TensorListLength(input_handle=_list(x)),
        floats("eb"),
    ),
    Case(
        "TensorListLength",
        lambda x, y: raw.TensorListLength(
            input_handle=_reserved(x, tf.shape(y)[0])
        ),
        floats("ab", "e"),
        letters="e",
        note="by n",
    ),
    Case(
        "TensorListElementShape",
        lambda x: raw.TensorListElementShape(
            input_handle=_list(x), shape_type=tf.int32
        ),
        floats("ebc"),
    ),
]
