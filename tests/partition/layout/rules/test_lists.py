"""Lists of tensors on towers, against one device.

What becomes of their elements is tried by random programs.
"""

import tensorflow as tf

from tests.partition import kit, tensor_lists as of
from tests.partition.layout.rules.cases.case import raw_op
from tests.partition.layout_list import as_listed


def _list(x, shape=None):
    shape = [-1] * (x.shape.rank - 1) if shape is None else shape
    return of.list_of(x, tf.constant(shape, tf.int32))


def _size(x):
    return tf.shape(x)[0]


def _pushed(x):
    return of.stack(of.push(_list(x), x[0] * 2), -1)


def _taken_apart(x):
    items = _list(x)
    items, last = of.pop(items, -1)
    first = of.get(items, 0, [-1, 2])
    return last, first, of.stack(items, [-1, -1])


def _sums(_, x, y):
    items = of.put(_list(x), 0, x[1])
    items = of.push(items, y)
    items = tf.add_n([items, _list(tf.ones((3, 2)))])
    items, last = of.pop(items, -1)
    number = of.length_of(items)
    return of.stack(items, -1), last, of.get(items, 1, -1), number


def _total(x, y):
    items = of.push(of.empty([2]), y)
    items = of.push(items, tf.reduce_sum(x, 0))
    return tf.reduce_sum(of.stack(items, -1), 0)


def _rows(x):
    items = _list(x, [2])
    return of.stack(items, [2]), of.length_of(items), of.shape_of(items)


def _nested(x):
    lists, shape = {"element_dtype": tf.variant}, tf.constant([], tf.int32)
    outer = raw_op("EmptyTensorList", **lists)(shape, -1)
    outer = of.push(outer, _list(x))
    outer = of.push(outer, of.push(of.empty([-1, 2]), x[0]))
    inner = raw_op("TensorListGetItem", **lists)(outer, 0, shape)
    return of.stack(inner, -1)


def _as_long_as_the_batch(x, y):
    n = _size(y)
    reserved = of.put(of.reserved([2, 3], 1 + n), 0, x)
    longer = of.resized(_list(tf.stack([x, x * 2])), 2 + n)
    return (
        tf.reduce_mean(of.stack(reserved, [2, 3]), 0),
        tf.reduce_mean(of.stack(longer, [2, 3]), 0),
        of.length_of(of.reserved([2, 3], n)),
    )


_BATCH, _SUM = kit.sharded(-1), kit.partial_sum(2, 2)
LISTS = {
    "another axis": (_pushed, kit.sharded(2, 3, -1)),
    "blocks": (_taken_apart, kit.sharded(2, -1, 2, blocks=2)),
    "rows of a unit": (_taken_apart, kit.sharded(2, -1, 2, rows=3)),
    "blocks of a unit": (_taken_apart, kit.sharded(2, -1, 2, blocks=2, rows=2)),
    "sums": (_sums, _BATCH, _SUM, kit.replicated(2)),
    "a sum beside what all have": (
        *(_total, kit.sharded(-1, 2), kit.replicated(2)),
    ),
    "rows as elements": (_rows, kit.sharded(-1, 2)),
    "lists of lists": (_nested, kit.sharded(2, -1, 2)),
    "as long as the batch, of what all have": (
        *(_as_long_as_the_batch, kit.replicated(2, 3), _BATCH),
    ),
    "as long as the batch, of a sum": (
        *(_as_long_as_the_batch, kit.partial_sum(2, 3), _BATCH),
    ),
}
test_lists = as_listed("lists", LISTS, exchanges=True)
