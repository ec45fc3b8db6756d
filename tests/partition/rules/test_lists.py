"""Lists of tensors on towers, against one device."""

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
_picked = raw_op("TensorListGather", **_FLOATS)
_resized = raw_op("TensorListResize")
_length = raw_op("TensorListLength")
_shape = raw_op("TensorListElementShape", shape_type=tf.int32)


def _list(x, shape=None):
    shape = [-1] * (x.shape.rank - 1) if shape is None else shape
    return raw_op("TensorListFromTensor")(x, tf.constant(shape, tf.int32))


def _joined(items, shape):
    no_sizes = tf.constant([], tf.int64)
    return raw_op("TensorListConcatV2", **_FLOATS)(items, shape, no_sizes)[:2]


def _size(x):
    return tf.shape(x)[0]


def _taken_apart(x):
    items = _list(x)
    items, last = _pop(items, -1)
    first = _get(items, 0, [-1, 2])
    return last, first, _stack(items, [-1, -1])


def _set_again(x, y):
    items = _set(_list(x), 1, y)
    items = _push(items, y * 2)
    return _stack(items, -1), _get(items, 1, [_size(y), 2])


def _filled(x, y):
    items = _set(_reserved([-1, 2], 3), 2, x)
    items = _set(items, 0, y)
    return _stack(items, [_size(x), 2])


def _unset(x):
    items = _set(_reserved([_size(x), 2], 3), 2, x)
    return _stack(items, -1), _get(items, 1, -1), _get(items, 2, -1)


def _never_set(x):
    items = _reserved([_size(x), 2], 2)
    for k in range(2):
        items = _set(items, k, x)
    items = tf.raw_ops.ZerosLike(x=items)
    return _stack(items, -1) + x


def _rows_among_zeros(x):
    zeros = _list(tf.zeros((2, _size(x), 2)))
    return _stack(_set(zeros, 1, x), -1)


def _added(x, y):
    own = _set(_reserved([-1, 2], 2), 0, x)
    items = tf.add_n([_list(y), own, _reserved([-1, 2], 2)])
    return _stack(items, -1)


def _scattered(x, at):
    items = raw_op("TensorListScatterV2")(x, at, [-1, 2], 4)
    return _get(items, at[0], -1), _get(items, at[1], -1)


def _measured(x):
    items = _list(x)
    told = _list(x, [-1, 2])
    return (
        _length(items),
        _shape(items),
        _shape(told),
        _stack(_push(told, x[0]), -1),
    )


_STEPS = kit.sharded(2, -1, 2)
_PLACES = kit.replicated(2, dtype="int32", low=0, high=1)
_DIVIDED = {
    "pop all": (_taken_apart, _STEPS),
    "set again": (_set_again, _STEPS, kit.sharded(-1, 2)),
    "filled": (_filled, kit.sharded(-1, 2), kit.sharded(-1, 2)),
    "unset": (_unset, kit.sharded(-1, 2)),
    "never set": (_never_set, kit.sharded(-1, 2)),
    "rows among zeros": (_rows_among_zeros, kit.sharded(-1, 2)),
    "added": (_added, kit.sharded(-1, 2), _STEPS),
    "picked": (lambda x, at: _picked(_list(x), at, [-1, 2]), _STEPS, _PLACES),
    "resized": (
        lambda x: _stack(_resized(_list(x), 4), [_size(x[0]), 2]),
        _STEPS,
    ),
    "joined": (
        lambda x: _joined(_list(x), [-1, -1, 2]),
        kit.sharded(2, 3, -1, 2),
    ),
    "scattered": (lambda x: _scattered(x, tf.constant([3, 1])), _STEPS),
    "length and shape": (_measured, _STEPS),
}


@pytest.mark.parametrize("name", _DIVIDED)
def test_lists_of_rows_are_divided(name):
    function, *given = _DIVIDED[name]
    kit.check_divided(function, *given)


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
