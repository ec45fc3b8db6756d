"""Loops on towers, of which each runs all rounds."""

import pytest
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.layouts import REPLICATED, Sharded
from tests.partition.kit import (
    computed_once,
    replicated,
    sharded,
    with_gradients,
)
from tests.partition.layout_list import as_listed

pytestmark = pytest.mark.alternate


def _loop(times, each, start, **options):
    """Go some rounds; return what has gone round but for the number."""

    def round_(i, *state):
        after = each(i, *state)
        return i + 1, *(after if isinstance(after, tuple) else (after,))

    found = tf.while_loop(
        lambda i, *_: i < times, round_, (0, *start), **options
    )
    return found[1:]


def _powers(x, w):
    return _loop(3, lambda i, y: tf.tanh(y @ w) + x, (x,))


def _penalty(x, w):
    """Its gradients are second derivatives."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(_powers(x, w))
    return tape.gradient(y, x)


def _zeros(x):
    return tf.zeros((tf.shape(x)[0], 2))


def _twice_as_late(x):
    """The third loop variable becomes rows in the third iteration only."""
    a = _zeros(x)
    return _loop(
        4, lambda i, a, b, c: (x + a, a + 1.0, b * 2.0), (a, a + 1.0, a + 2.0)
    )


def _wider(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None, None])
    each = lambda i, y: tf.concat([y, x], 1)  # noqa: E731
    return _loop(3, each, (x,), shape_invariants=shapes)


def _noisy(x):
    def each(i, y):
        return y * tf.random.stateless_uniform((2,), tf.stack([i, 7]))

    return _loop(3, each, (x,))


def _with_a_choice_of_sizes(x):
    """Its inner results are the same for all towers, not its inputs."""

    def each(i, y):
        n = tf.cond(i > 1, lambda: tf.shape(x)[0], lambda: 0)
        return y + tf.cast(n, tf.float32) * x

    return _loop(3, each, (_zeros(x),))


def _by_another_axis(x):
    """The axis, which is a known number, is another one in later rounds."""

    def each(i, axis, y):
        return 1 - axis, y + tf.reduce_sum(y, axis, keepdims=True)

    return _loop(2, each, (tf.constant(1), x))[1]


def _longer(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None, 2])
    each = lambda i, y: tf.concat([y, x], 0)  # noqa: E731
    return _loop(3, each, (x,), shape_invariants=shapes)


def _until_the_batch_is_small(x):
    return tf.while_loop(
        lambda y: tf.reduce_sum(tf.abs(y)) > 0.1, lambda y: (y / 2,), (x,)
    )


def _examples_mixed(x):
    return _loop(2, lambda i, y: y - tf.reduce_mean(y, 0), (x,))


def _pairs(x, mask):
    return tf.reshape(tf.boolean_mask(x, mask), [-1, 2])


def _masked_in_a_loop(x):
    mask = x[:, 0] > 0
    each = lambda i, y: y + tf.reduce_sum(_pairs(x, mask))  # noqa: E731
    return _loop(3, each, (0.0,)), _pairs(x, mask)


def _masked_in_branches(x):
    mask, way = x[:, 0] > 0, tf.reduce_sum(x) > 0
    total = tf.cond(
        way,
        lambda: tf.reduce_sum(_pairs(x, mask)),
        lambda: tf.reduce_sum(_pairs(-x, mask)),
    )
    return total, _pairs(x, mask)


def _masked_by_branches(x):
    mask, way = x[:, 0] > 0, tf.reduce_sum(x) > 0
    kept = tf.cond(way, lambda: _pairs(x, mask), lambda: _pairs(-x, mask))
    return 2 * kept, _pairs(x, mask)


def _scanned(x, w):
    """States of all times, of time-major rows."""
    steps = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x)
    states = tf.TensorArray(tf.float32, tf.shape(x)[0])

    def each(i, state, states):
        state = tf.tanh(steps.read(i) @ w + state)
        return state, states.write(i, state)

    return _loop(tf.shape(x)[0], each, (tf.zeros_like(x[0]), states))[1].stack()


def _weighted(x, v):
    """By weights of a list that all have."""
    weights = tf.TensorArray(tf.float32, 3).unstack(v)
    return _loop(3, lambda i, y: tf.tanh(y * weights.read(i)), (x,))


_X, _W, _TIMES = sharded(-1, 2), replicated(2, 2), sharded(3, -1, 2)
_OTHERS = sharded(2, -1, 2), replicated(2, 2, 2)
_NONE = replicated(1, dtype="int32", low=0, high=0)
LOOPS = {
    "rows": (_powers, _X, _W),
    "gradients": (with_gradients(_powers), _X, _W),
    "second derivatives": (with_gradients(_penalty), _X, _W),
    "another axis": (with_gradients(_powers), *_OTHERS),
    "rows of a unit": (with_gradients(_powers), sharded(-1, 2, rows=2), _W),
    "blocks": (_powers, sharded(-1, 2, blocks=2, rows=3), _W),
    # Loop variables that change their layout.
    "late": (with_gradients(_twice_as_late), _X),
    "wider": (_wider, _X),
    "no rounds": (
        with_gradients(lambda x, n: _loop(n[0], lambda i, y: y + x, (x,))),
        *(_X, _NONE),
    ),
    "draws": (_noisy, _X),
    "a choice of sizes": (_with_a_choice_of_sizes, _X),
    "lists of rows": (_scanned, _TIMES, _W),
    "gradients of lists": (with_gradients(_scanned), _TIMES, _W),
    "a list that all have": (
        with_gradients(_weighted),
        *(_X, replicated(3, 2)),
    ),
    # Computed once.
    "by another axis": (_by_another_axis, _X),
    "longer": (_longer, _X),
    "until the batch is small": (_until_the_batch_is_small, _X),
    "examples mixed": (_examples_mixed, _X),
    # A function counts the rows that it finds.
    "masked in a loop": (_masked_in_a_loop, sharded(-1, 4)),
    "masked in branches": (_masked_in_branches, sharded(-1, 4)),
    "masked by branches": (_masked_by_branches, sharded(-1, 4)),
}
test_loops = as_listed("loops", LOOPS, exchanges=True, tolerance=1e-4)


def test_a_loop_reads_between_the_writes_around_it():
    graph, variable = compat.FuncGraph("one_device"), tf.Variable([3.0, 4.0])
    with graph.as_default():
        handle = graph.capture(variable.handle)
        x = tf.compat.v1.placeholder(tf.float32, (None, 2))

        def write(value):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

        def read():
            found = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            return tf.ensure_shape(found, (2,))

        write(tf.reduce_sum(x, 0))
        (y,) = _loop(2, lambda i, y: y * read(), (x,))
        write(tf.constant([1.0, 2.0]))
        again = read()
    graph.inputs = [handle, x]
    program = partition_graph(graph, [REPLICATED, Sharded(0)], [y, again])
    assert not computed_once(program)
    first, last = [
        o.inputs[1] for o in program.operations if o.type == "AssignVariableOp"
    ]
    (loop,) = [o for o in program.operations if o.type == "While"]
    assert "towers" in loop.axes and first in loop.inputs
    assert all(tensor.handle is None for tensor in loop.inputs)
    assert program.results[1].operation.inputs[0] is last
    assert all(o.type != "ReadVariableOp" for o in program.operations)
