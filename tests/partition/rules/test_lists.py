"""Lists of tensors on towers, against one device.

What becomes of their elements is tried by random programs.
"""

import pytest
import tensorflow as tf

from tests.partition import kit, tensor_lists as of
from tests.partition.rules.cases.case import raw_op


def _list(x, shape=None):
    shape = [-1] * (x.shape.rank - 1) if shape is None else shape
    return of.list_of(x, tf.constant(shape, tf.int32))


def _size(x):
    return tf.shape(x)[0]


def _taken_apart(x):
    items = _list(x)
    items, last = of.pop(items, -1)
    first = of.get(items, 0, [-1, 2])
    return last, first, of.stack(items, [-1, -1])


_STEPS = kit.sharded(2, -1, 2)


def test_other_axes_and_blocks_of_rows():
    kit.check_divided(
        lambda x: of.stack(of.push(_list(x), x[0] * 2), -1),
        kit.sharded(2, 3, -1),
    )
    for place in ({"blocks": 2}, {"rows": 3}, {"blocks": 2, "rows": 2}):
        kit.check_divided(_taken_apart, kit.sharded(2, -1, 2, **place))


def test_lists_of_partial_sums_stay_partial():
    def parts(_, x, y):
        items = of.put(_list(x), 0, x[1])
        items = of.push(items, y)
        items = tf.add_n([items, _list(tf.ones((3, 2)))])
        items, last = of.pop(items, -1)
        return (
            of.stack(items, -1),
            last,
            of.get(items, 1, -1),
            of.length_of(items),
        )

    program = kit.check_on_towers(
        parts, kit.sharded(-1), kit.partial_sum(2, 2), kit.replicated(2)
    )
    assert set(kit.exchange_counts(program)) <= {"sum", "first"}


def test_sums_over_elements_are_partial():
    def total(x, y):
        items = of.push(of.empty([2]), y)
        items = of.push(items, tf.reduce_sum(x, 0))
        return tf.reduce_sum(of.stack(items, -1), 0)

    program = kit.check_divided(total, kit.sharded(-1, 2), kit.replicated(2))
    assert kit.exchange_counts(program) == {"sum": 1}


def test_each_tower_has_its_own_elements():
    def back(x):
        items = _list(x, [2])
        return of.stack(items, [2]), of.length_of(items), of.shape_of(items)

    program = kit.check_divided(back, kit.sharded(-1, 2))
    assert kit.exchange_counts(program) == {"gather": 1}


def test_lists_of_lists():
    def nested(x):
        lists, shape = {"element_dtype": tf.variant}, tf.constant([], tf.int32)
        outer = raw_op("EmptyTensorList", **lists)(shape, -1)
        outer = of.push(outer, _list(x))
        outer = of.push(outer, of.push(of.empty([-1, 2]), x[0]))
        inner = raw_op("TensorListGetItem", **lists)(outer, 0, shape)
        return of.stack(inner, -1)

    kit.check_divided(nested, _STEPS)


@pytest.mark.parametrize("given", [kit.replicated(2, 3), kit.partial_sum(2, 3)])
def test_lists_as_long_as_the_batch(given):
    def lists(x, y):
        n = _size(y)
        reserved = of.put(of.reserved([2, 3], 1 + n), 0, x)
        pair = _list(tf.stack([x, x * 2]))
        longer = of.resized(pair, 2 + n)
        return (
            tf.reduce_mean(of.stack(reserved, [2, 3]), 0),
            tf.reduce_mean(of.stack(longer, [2, 3]), 0),
            of.length_of(of.reserved([2, 3], n)),
        )

    kit.check_on_towers(lists, given, kit.sharded(-1))
