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
NUMBERS = tf.constant([0, 2, 2, 1, 0])


def _initial():
    generator = np.random.default_rng(1)
    return {
        "w": generator.normal(size=(4, 3)).astype(np.float32),
        "large": generator.normal(size=(4, 300)).astype(np.float32),
        "moving": np.zeros(3, np.float32),
        "counter": np.zeros((), np.int64),
        "state": np.array([3, 5, 7], np.int64),
    }


def _variables():
    return {name: tf.Variable(value) for name, value in _initial().items()}


def check(function, steps=2, ranks=False, is_random=False):
    """Check that all copies are what one device has; return the program.

    Args:
        function: takes rows, numbers, and variables by their names.
        steps: how many are taken.
        ranks: whether several processes run it.
        is_random: whether one device has something else.
    """
    one, towers = _variables(), [_variables() for _ in COUNTS]
    wanted = tf.function(lambda x, k: function(x, k, **one), autograph=False)

    def traced(x, k):
        return [*map(tf.convert_to_tensor, function(x, k, **towers[0]))]

    specs = [tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)]
    graph = compat.func_graph_from_py_func("one_device", traced, specs, {})
    names = {id(v.handle): name for name, v in towers[0].items()}
    outer = [tensor for tensor, _ in graph.captures]
    layouts = [Sharded(0), Sharded(0)] + [REPLICATED] * len(outer)
    mirrored = [False, False, *(id(tensor) in names for tensor in outer)]
    program = partition_graph(
        graph, layouts, graph.outputs, ranks=ranks, mirrored=mirrored
    )
    copies = {
        index + 2: [own[names[id(tensor)]].handle for own in towers]
        for index, tensor in enumerate(outer)
        if id(tensor) in names
    }
    assert program.inputs.copies.keys() == copies.keys()

    @tf.function(autograph=False)
    def run():
        parts = [tf.split(tensor, COUNTS) for tensor in (X, NUMBERS)]
        given = [*parts, *([tensor] for tensor in outer)]
        return on_towers(program, given, COUNTS, copies=copies)

    for _ in range(steps):
        found, right = run(), wanted(X, NUMBERS)
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
    def function(x, _, w, **others):
        return [tf.reduce_sum(tf.square(x @ w))]

    program = check(function)
    assert kinds(program) == {"sum": 1}
    assert types(program, True)["ReadVariableOp"] == 1
    assert "ReadVariableOp" not in types(program, False)


def test_what_is_computed_once_reads_the_common_one():
    def function(x, _, large, **others):
        return [tf.reduce_sum(x), tf.reduce_sum(large**2)]

    program = check(function)
    assert kinds(program) == {"sum": 1}
    assert types(program, False)["ReadVariableOp"] == 1
    assert "ReadVariableOp" not in types(program, True)


def test_a_cast_of_a_weight_is_computed_where_it_is_needed():
    def function(x, _, large, **others):
        half = tf.cast(large, tf.float16)
        rows = tf.cast(tf.cast(x, tf.float16) @ half, tf.float32)
        return [tf.reduce_sum(rows**2 * 1e-3), tf.reduce_sum(half) * 0]

    program = check(function)
    assert kinds(program) == {"sum": 1}
    assert types(program, False)["Cast"] == 1
    assert types(program, True)["Cast"] == 3


def test_a_step_by_hand():
    """Moving statistics, a counter, and a gradient's step."""

    def function(x, _, w, moving, counter, **others):
        with tf.GradientTape() as tape:
            y = x @ w
            mean = tf.reduce_mean(y, 0)
            loss = tf.reduce_mean(tf.nn.softplus(y - mean))
            loss += 0.1 * tf.reduce_sum(w**2)
        moving.assign(0.9 * moving + 0.1 * mean)
        counter.assign_add(1)
        rate = 0.1 / tf.cast(counter, tf.float32)
        w.assign_sub(rate * tape.gradient(loss, w))
        return [loss, moving.read_value(), counter]

    program = check(function, 3)
    written = [o for o in program.operations if o.has_effect]
    assert len(written) == 3
    assert all(o.on_towers for o in written)


def test_reads_after_writes():
    def function(x, _, w, moving, large, **others):
        before = moving.read_value()
        moving.assign_add(tf.reduce_sum(x @ w, 0))
        scaled = x @ (w * moving)
        moving.assign(tf.reduce_sum(scaled, 0))
        large.assign(large * 2.0 + moving[0])
        y = x @ tf.cast(large, tf.float32)
        large.assign_add(tf.ones_like(large))
        return [
            before,
            moving.read_value(),
            tf.reduce_sum(y),
            tf.unique(tf.reshape(large, [-1]))[0],
        ]

    check(function)


def test_rows_of_a_table_are_read_and_written():
    def function(x, numbers, w, **others):
        rows = tf.nn.embedding_lookup(w, numbers)
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(tf.gather(w, numbers) ** 3)
        slices = tape.gradient(loss, w)
        w.scatter_nd_sub(slices.indices[:, None], 0.1 * slices.values)
        w.scatter_add(tf.IndexedSlices(rows[:1], numbers[:1]))
        return [tf.reduce_sum(rows), loss, w.read_value()]

    check(function)


@pytest.mark.parametrize("writes", [False, True])
def test_a_branch(writes):
    def function(x, _, w, counter, moving, **others):
        def one():
            if writes:
                counter.assign_add(2)
            return w * 2.0

        def other():
            if writes:
                moving.assign_add(tf.reduce_sum(x @ w, 0))
            return w + moving

        found = tf.cond(counter % 2 == 0, one, other)
        w.assign(found * 0.5)
        counter.assign_add(1)
        after = tf.cond(tf.reduce_sum(x) > 0, lambda: x @ w, lambda: x @ found)
        return [found, tf.reduce_sum(after), counter]

    check(function, 3)


@pytest.mark.parametrize("writes", [False, True])
def test_a_loop(writes):
    def function(x, _, w, counter, moving, **others):
        def of_rows(k, y):
            if writes:
                moving.assign_add(tf.reduce_sum(y @ w, 0))
            return k + 1, y @ w @ tf.transpose(w) * 0.1

        def of_all(k, y):
            if writes:
                counter.assign_add(1)
            return k + 1, y @ tf.transpose(w) @ w * 0.1

        _, y = tf.while_loop(lambda k, _: k < 3, of_rows, [0, x])
        _, z = tf.while_loop(lambda k, _: k < 3, of_all, [0, w + 0.0])
        each = tf.map_fn(lambda row: tf.linalg.matvec(w, moving) * row, x)
        w.assign_add(z * 0.01)
        return [tf.reduce_sum(y), z, tf.reduce_sum(each), counter]

    check(function)


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_what_draws_writes_once_and_all_copies_are_alike(loops, ranks):
    def function(x, _, w, moving, **others):
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
    def function(x, _, counter, state, **others):
        noise = tf.raw_ops.StatefulStandardNormalV2(
            resource=state.handle,
            algorithm=tf.constant(1, tf.int64),
            shape=tf.shape(x),
        )
        counter.assign_add(tf.cast(tf.reduce_sum(noise * x) * 100, tf.int64))
        return [tf.reduce_sum(x * noise)]

    program = check(function)
    assert types(program, True)["StatefulStandardNormalV2"] == 1
