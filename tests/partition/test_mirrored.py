"""Variables of which each tower has its own copy."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.partition.kit import kinds, on_towers

COUNTS = (3, 0, 2)
X = tf.constant(np.random.default_rng(0).normal(size=(5, 4)), tf.float32)


def _variables():
    normal = np.random.default_rng(1).normal
    initial = {
        "w": normal(size=(4, 3)).astype(np.float32),
        "large": normal(size=(4, 300)).astype(np.float32),
        "moving": np.zeros(3, np.float32),
        "counter": np.zeros((), np.int64),
        "state": np.array([3, 5, 7], np.int64),
    }
    return {name: tf.Variable(value) for name, value in initial.items()}


def check(function, ranks=False, is_random=False):
    """Check that all copies are what one device has; return the program.

    Args:
        function: takes rows, and variables by their names.
        ranks: whether several processes run it.
        is_random: whether one device has something else.
    """
    one, towers = _variables(), [_variables() for _ in COUNTS]
    wanted = tf.function(lambda x: function(x, **one), autograph=False)

    def traced(x):
        return [*map(tf.convert_to_tensor, function(x, **towers[0]))]

    specs = [tf.TensorSpec([None, 4])]
    graph = compat.func_graph_from_py_func("one_device", traced, specs, {})
    names = {id(v.handle): name for name, v in towers[0].items()}
    outer = [tensor for tensor, _ in graph.captures]
    layouts = [Sharded(0)] + [REPLICATED] * len(outer)
    mirrored = [False, *(id(tensor) in names for tensor in outer)]
    program = partition_graph(
        graph, layouts, graph.outputs, ranks=ranks, mirrored=mirrored
    )
    copies = {
        index + 1: [own[names[id(tensor)]].handle for own in towers]
        for index, tensor in enumerate(outer)
        if id(tensor) in names
    }
    assert program.inputs.copies.keys() == copies.keys()

    @tf.function(autograph=False)
    def run():
        given = [tf.split(X, COUNTS), *([tensor] for tensor in outer)]
        return on_towers(program, given, COUNTS, copies=copies)

    for _ in range(2):
        found, right = run(), wanted(X)
        if not is_random:
            for own, other in zip(found, right, strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
        for name in one:
            device = (towers[0] if is_random else one)[name]
            for own in towers:
                np.testing.assert_allclose(
                    own[name], device, rtol=1e-4, atol=1e-5, err_msg=name
                )
    return program


def types(program, on_towers):
    """How many operations of each type are done once, or by towers."""
    return collections.Counter(
        o.type for o in program.operations if o.on_towers == on_towers
    )


def test_towers_read_their_own_copies():
    def function(x, w, **others):
        return [tf.reduce_sum(tf.square(x @ w))]

    program = check(function)
    assert kinds(program) == {"sum": 1}
    assert types(program, True)["ReadVariableOp"] == 1
    assert "ReadVariableOp" not in types(program, False)


def test_what_is_computed_once_reads_the_common_one():
    def function(x, large, **others):
        return [tf.reduce_sum(x), tf.reduce_sum(large**2)]

    program = check(function)
    assert kinds(program) == {"sum": 1}
    assert types(program, False)["ReadVariableOp"] == 1
    assert "ReadVariableOp" not in types(program, True)


def test_a_cast_of_a_weight_is_computed_where_it_is_needed():
    def function(x, large, **others):
        half = tf.cast(large, tf.float16)
        rows = tf.cast(tf.cast(x, tf.float16) @ half, tf.float32)
        return [tf.reduce_sum(rows**2 * 1e-3), tf.reduce_sum(half) * 0]

    program = check(function)
    assert kinds(program) == {"sum": 1}
    assert types(program, False)["Cast"] == 1
    assert types(program, True)["Cast"] == 3


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_what_draws_writes_once_and_all_copies_are_alike(loops, ranks):
    def function(x, w, moving, **others):
        def draw():
            moving.assign_add(tf.random.normal([3]) + w[0])
            return w * moving

        positive = tf.reduce_sum(x) > -100
        if loops:
            _, found = tf.while_loop(
                lambda k, _: k < 2, lambda k, _: (k + 1, draw()), [0, w + 0.0]
            )
        else:
            found = tf.cond(positive, draw, lambda: w * 1.0)
        w.assign(found)
        return [tf.reduce_sum(x @ w), moving.read_value()]

    program = check(function, ranks=ranks, is_random=True)
    assert bool(kinds(program)["root"]) == ranks


def test_the_state_of_a_generator():
    def function(x, counter, state, **others):
        noise = tf.raw_ops.StatefulStandardNormalV2(
            resource=state.handle,
            algorithm=tf.constant(1, tf.int64),
            shape=tf.shape(x),
        )
        counter.assign_add(tf.cast(tf.reduce_sum(noise * x) * 100, tf.int64))
        return [tf.reduce_sum(x * noise)]

    program = check(function)
    assert types(program, True)["StatefulStandardNormalV2"] == 1
