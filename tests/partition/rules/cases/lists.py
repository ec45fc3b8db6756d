"""Lists of tensors."""

import tensorflow as tf

from tests.partition.rules.cases.case import cases, raw, size


def _shape(x, less=0):
    return tf.constant([-1] * (x.shape.rank - less))


def _list(x):
    shape = _shape(x, 1)
    return tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=shape)


def _taken(name, elements, rank, *places, **options):
    """What an operation takes out of a list, whose elements have a rank."""
    shape = tf.constant([-1] * rank)
    take = raw(
        f"TensorList{name}",
        element_shape=shape,
        element_dtype=tf.float32,
        **options,
    )
    return take(elements, *places)


def _stack(elements, rank=2):
    return _taken("Stack", elements, rank)


def _reserved(x, count):
    return raw("TensorListReserve", element_dtype=tf.float32)(_shape(x), count)


def _set(elements, *items):
    for index, item in enumerate(items):
        elements = raw("TensorListSetItem")(elements, index, item)
    return elements


def _pushed(x, y):
    empty = raw("EmptyTensorList", element_dtype=tf.float32)
    elements = empty(_shape(x), -1)
    for item in (x, y):
        elements = raw("TensorListPushBack")(elements, item)
    return elements


def _resized(elements, size):
    return raw("TensorListResize")(elements, size)


_length = raw("TensorListLength")
CASES = [
    *cases(
        "abc",
        {
            "TensorListFromTensor": lambda x: _stack(_list(x)),
            "TensorListStack": lambda x: _stack(_list(x)),
        },
    ),
    *cases(
        "bac",
        {"TensorListGetItem": lambda x: _taken("GetItem", _list(x), 2, 1)},
    ),
    *cases(
        "ab, ab",
        {
            "TensorListSetItem": lambda x, y: _stack(
                _set(_reserved(x, 2), x, y)
            ),
            "EmptyTensorList": lambda x, y: _stack(_pushed(x, y)),
            "TensorListPushBack": lambda x, y: _stack(_pushed(x, y)),
            "TensorListPopBack": lambda x, y: _taken(
                "PopBack", _pushed(x, y), 2
            )[1],
            "TensorListGather": lambda x, y: _taken(
                "Gather", _pushed(x, y), 2, [1, 0, 1]
            ),
        },
    ),
    *cases(
        "ab, ab",
        {
            "TensorListConcatV2": lambda x, y: _taken(
                "ConcatV2", _pushed(x, y), 2, tf.constant([], tf.int64)
            )[0]
        },
    ),
    *cases(
        "ab",
        {
            "TensorListReserve": lambda x: tf.reduce_sum(
                _stack(_set(_reserved(x, 3), x)), 0
            )
        },
    ),
    *cases(
        "ab, e",
        {
            "TensorListReserve-by n": lambda x, y: tf.reduce_mean(
                _stack(_set(_reserved(x, 1 + size(y)), x)), 0
            ),
            "TensorListResize-by n": lambda x, y: tf.reduce_mean(
                _stack(_resized(_pushed(x, x), 2 + size(y)))
            ),
            "TensorListLength-by n": lambda x, y: _length(
                _reserved(x, size(y))
            ),
        },
    ),
    *cases(
        "eb",
        {
            "TensorListGather-reversed": lambda x: _taken(
                "Gather", _list(x), 1, tf.range(size(x))[::-1]
            )
        },
    ),
    *cases(
        "db",
        {
            "TensorListResize": lambda x: tf.reduce_sum(
                _stack(_resized(_list(x), 4), 1), 0
            )
        },
    ),
    *cases("eb", {"TensorListLength": lambda x: _length(_list(x))}),
    *cases(
        "ebc",
        {
            "TensorListElementShape": lambda x: raw(
                "TensorListElementShape", shape_type=tf.int32
            )(_list(x))
        },
    ),
]
