"""Lists of tensors on towers, against one device.

What becomes of their elements is tried by random programs.
"""

import pytest
import tensorflow as tf

from tests.partition import kit
from tests.partition.rules.cases.case import raw_op

_FLOATS = {"element_dtype": tf.float32}
_reserved = raw_op("TensorListReserve", **_FLOATS)
_empty = raw_op("EmptyTensorList", max_num_elements=-1, **_FLOATS)
_set = raw_op("TensorListSetItem")
_push = raw_op("TensorListPushBack")
_pop = raw_op("TensorListPopBack", **_FLOATS)
_get = raw_op("TensorListGetItem", **_FLOATS)
_stack = raw_op("TensorListStack", **_FLOATS)
_resized = raw_op("TensorListResize")
_length = raw_op("TensorListLength")
_shape = raw_op("TensorListElementShape", shape_type=tf.int32)


def _list(x, shape=None):
    shape = [-1] * (x.shape.rank - 1) if shape is None else shape
    return raw_op("TensorListFromTensor")(x, tf.constant(shape, tf.int32))


def _size(x):
    return tf.shape(x)[0]


def _taken_apart(x):
    items = _list(x)
    items, last = _pop(items, -1)
    first = _get(items, 0, [-1, 2])
    return last, first, _stack(items, [-1, -1])


_STEPS = kit.sharded(2, -1, 2)


def test_other_axes_and_blocks_of_rows():
    kit.check_divided(
        lambda x: _stack(_push(_list(x), x[0] * 2), -1),
        kit.sharded(2, 3, -1),
    )
    for place in ({"blocks": 2}, {"rows": 3}, {"blocks": 2, "rows": 2}):
        kit.check_divided(_taken_apart, kit.sharded(2, -1, 2, **place))


def test_lists_of_partial_sums_stay_partial():
    def parts(_, x, y):
        items = _set(_list(x), 0, x[1])
        items = _push(items, y)
        items = tf.add_n([items, _list(tf.ones((3, 2)))])
        items, last = _pop(items, -1)
        return _stack(items, -1), last, _get(items, 1, -1), _length(items)

    program = kit.check_on_towers(
        parts, kit.sharded(-1), kit.partial_sum(2, 2), kit.replicated(2)
    )
    assert set(kit.exchange_counts(program)) <= {"sum", "first"}


def test_sums_over_elements_are_partial():
    def total(x, y):
        items = _push(_empty([2]), y)
        items = _push(items, tf.reduce_sum(x, 0))
        return tf.reduce_sum(_stack(items, -1), 0)

    program = kit.check_divided(total, kit.sharded(-1, 2), kit.replicated(2))
    assert kit.exchange_counts(program) == {"sum": 1}


def test_each_tower_has_its_own_elements():
    def back(x):
        items = _list(x, [2])
        return _stack(items, [2]), _length(items), _shape(items)

    program = kit.check_divided(back, kit.sharded(-1, 2))
    assert kit.exchange_counts(program) == {"gather": 1}


def test_lists_of_lists():
    def nested(x):
        lists, shape = {"element_dtype": tf.variant}, tf.constant([], tf.int32)
        outer = raw_op("EmptyTensorList", **lists)(shape, -1)
        outer = _push(outer, _list(x))
        outer = _push(outer, _push(_empty([-1, 2]), x[0]))
        inner = raw_op("TensorListGetItem", **lists)(outer, 0, shape)
        return _stack(inner, -1)

    kit.check_divided(nested, _STEPS)


@pytest.mark.parametrize("given", [kit.replicated(2, 3), kit.partial_sum(2, 3)])
def test_lists_as_long_as_the_batch(given):
    def lists(x, y):
        n = _size(y)
        reserved = _set(_reserved([2, 3], 1 + n), 0, x)
        pair = _list(tf.stack([x, x * 2]))
        longer = _resized(pair, 2 + n)
        return (
            tf.reduce_mean(_stack(reserved, [2, 3]), 0),
            tf.reduce_mean(_stack(longer, [2, 3]), 0),
            _length(_reserved([2, 3], n)),
        )

    kit.check_on_towers(lists, given, kit.sharded(-1))
