"""Branches and loops on towers, against one device."""

import functools

import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.partition.kit import (
    FEW,
    check_divided,
    check_on_towers,
    computed_once,
    exchange_counts,
    partial_sum,
    replicated,
    sharded,
    with_gradients,
)

_check = functools.partial(check_divided, towers=FEW)
_WAY = replicated(1, dtype="bool")


# ---- branches ----------------------------------------------------------------


def _branches(x, w):
    return lambda: tf.tanh(x @ w), lambda: tf.exp(x) @ tf.ones((3, 2))


def _rows_or_zeros(x):
    zeros = tf.zeros((tf.shape(x)[0], 3))
    return lambda: x, lambda: zeros + 1


# A function, its inputs besides the predicate, and its exchanges.
_BRANCHES = {
    "gradients": (
        with_gradients(lambda way, *given: tf.cond(way[0], *_branches(*given))),
        (sharded(-1, 3), replicated(3, 2)),
        {"gather": 2, "sum": 1},
    ),
    "rows, or what all have": (
        lambda way, x: tf.cond(way[0], *_rows_or_zeros(x)),
        (sharded(-1, 3),),
        {"gather": 1},
    ),
    "a part of a sum, or what all have": (
        lambda way, x, y: tf.cond(
            way[0], lambda: tf.reduce_sum(x, 0), lambda: y
        ),
        (sharded(-1, 3), replicated(3)),
        {"sum": 1},
    ),
    "a sum of which the whole is needed": (
        lambda way, x, y: tf.cond(way[0], lambda: x * tf.exp(y), lambda: x),
        (sharded(-1, 3), partial_sum(3)),
        {"sum": 1, "gather": 1},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", _BRANCHES)
def test_each_branch_is_divided(name, seed):
    function, given, exchanges = _BRANCHES[name]
    program = _check(function, _WAY, *given, seed=seed)
    assert exchange_counts(program) == exchanges


@pytest.mark.parametrize("seed", range(4))
def test_switch_case_chooses_one_of_several(seed):
    def choose(at, x, y):
        return tf.switch_case(
            at[0], [lambda: x * 2.0, lambda: tf.nn.softmax(x), lambda: x + y]
        )

    given = (
        replicated(1, dtype="int32", low=-1, high=3),
        sharded(-1, 3),
        sharded(-1, 3),
    )
    _check(with_gradients(choose), *given, seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_choice_by_the_batch_is_the_same_for_all_towers(seed):
    def choose(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1)

    program = check_on_towers(choose, sharded(-1, 3), towers=FEW, seed=seed)
    assert set(computed_once(program)) <= {"Greater"}
    assert exchange_counts(program) == {"sum": 1, "gather": 1}


@pytest.mark.parametrize("seed", range(2))
def test_a_branch_of_rows_and_partial_sums_is_computed_once(seed):
    def choose(way, x, y):
        return tf.cond(way[0], lambda: tf.exp(x), lambda: y)

    given = _WAY, sharded(-1, 3), partial_sum(1, 3)
    program = check_on_towers(choose, *given, towers=((2, 0, 0),), seed=seed)
    assert "StatelessIf" in computed_once(program)


def test_a_branch_that_is_known_takes_the_place_of_the_choice():
    def choose(x):
        return tf.cond(
            tf.constant(True) & (tf.rank(x) > 1), lambda: x, lambda: -x
        )

    program = _check(choose, sharded(-1, 3))
    assert not any("If" in o.type for o in program.operations)


# ---- loops -------------------------------------------------------------------


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


def test_loops_carry_rows_and_their_gradients():
    program = _check(_powers, sharded(-1, 2), replicated(2, 2))
    assert exchange_counts(program) == {"gather": 1}
    program = _check(with_gradients(_powers), sharded(-1, 2), replicated(2, 2))
    assert exchange_counts(program) == {"gather": 2, "sum": 1}
    assert program.levels == 1


def test_loops_carry_second_derivatives():
    def penalty(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(_powers(x, w))
        return tape.gradient(y, x)

    given = sharded(-1, 2), replicated(2, 2)
    check_on_towers(with_gradients(penalty), *given, towers=FEW, tolerance=1e-4)


def test_loops_carry_other_axes_and_blocks_of_rows():
    _check(with_gradients(_powers), sharded(2, -1, 2), replicated(2, 2, 2))
    _check(with_gradients(_powers), sharded(-1, 2, rows=2), replicated(2, 2))
    _check(_powers, sharded(-1, 2, blocks=2, rows=3), replicated(2, 2))


def _zeros(x):
    return tf.zeros((tf.shape(x)[0], 2))


def _divided_by_the_number(x):
    def each(i, y):
        n = tf.cast(tf.shape(y)[0], tf.float32)
        return y / n + tf.ones_like(y) * tf.cast(i, tf.float32)

    return _loop(2, each, (x,))


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


def _of_loops(x, w):
    """Loops within loops, of which the tape keeps lists of lists."""

    def each(i, y):
        (z,) = _loop(2, lambda j, z: tf.tanh(z @ w), (y,))
        return tf.cond(i > 0, lambda: z * x, lambda: z + x)

    return _loop(3, each, (x,))


def _with_a_choice_of_sizes(x):
    """Its inner results are the same for all towers, not its inputs."""

    def each(i, y):
        n = tf.cond(i > 1, lambda: tf.shape(x)[0], lambda: 0)
        return y + tf.cast(n, tf.float32) * x

    return _loop(3, each, (_zeros(x),))


# Loop variables that change their layout: from replicated to sharded, ...
_DIVIDED = {
    "zeros": (
        lambda x: _loop(3, lambda i, y: y + x, (_zeros(x),)),
        sharded(-1, 2),
    ),
    "sums": (
        lambda x, y: _loop(3, lambda i, s: s + tf.reduce_sum(x, 0), (y,)),
        sharded(-1, 2),
        replicated(2),
    ),
    "factors": (
        lambda x, y: _loop(2, lambda i, z: z * tf.exp(y), (x,)),
        sharded(-1, 2),
        partial_sum(2),
    ),
    "late": (with_gradients(_twice_as_late), sharded(-1, 2)),
    "wider": (_wider, sharded(-1, 2)),
    "the number of examples": (_divided_by_the_number, sharded(-1, 2)),
    "as often as there are examples": (
        with_gradients(
            lambda x: _loop(tf.shape(x)[0], lambda i, y: y * 0.5 + x, (x,))
        ),
        sharded(-1, 2),
    ),
    "no rounds": (
        with_gradients(lambda x, n: _loop(n[0], lambda i, y: y + x, (x,))),
        sharded(-1, 2),
        replicated(1, dtype="int32", low=0, high=0),
    ),
    "draws": (_noisy, sharded(-1, 2)),
    "a choice of sizes": (_with_a_choice_of_sizes, sharded(-1, 2)),
    "loops": (with_gradients(_of_loops), sharded(-1, 2), replicated(2, 2)),
}


@pytest.mark.parametrize("name", _DIVIDED)
def test_loops_are_divided(name):
    function, *given = _DIVIDED[name]
    program = _check(function, *given, tolerance=1e-4)
    assert exchange_counts(program)["sum"] <= 1


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


@pytest.mark.parametrize(
    "function",
    [_by_another_axis, _longer, _until_the_batch_is_small, _examples_mixed],
)
def test_loops_are_computed_once(function):
    program = check_on_towers(function, sharded(-1, 2), towers=FEW)
    assert "StatelessWhile" in computed_once(program)


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


@pytest.mark.parametrize(
    "function", [_masked_in_a_loop, _masked_in_branches, _masked_by_branches]
)
def test_a_function_counts_the_rows_that_it_finds(function):
    check_on_towers(function, sharded(-1, 4), towers=FEW)


def _scanned(x, w):
    """States of all times, of time-major rows."""
    steps = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x)
    states = tf.TensorArray(tf.float32, tf.shape(x)[0])

    def each(i, state, states):
        state = tf.tanh(steps.read(i) @ w + state)
        return state, states.write(i, state)

    return _loop(tf.shape(x)[0], each, (tf.zeros_like(x[0]), states))[1].stack()


def test_loops_carry_lists_of_rows():
    program = _check(_scanned, sharded(3, -1, 2), replicated(2, 2))
    assert exchange_counts(program) == {"gather": 1}
    program = _check(
        with_gradients(_scanned), sharded(3, -1, 2), replicated(2, 2)
    )
    assert exchange_counts(program) == {"gather": 2, "sum": 1}


def test_gradients_of_a_list_that_all_have():
    def weighted(x, v):
        weights = tf.TensorArray(tf.float32, 3).unstack(v)
        return _loop(3, lambda i, y: tf.tanh(y * weights.read(i)), (x,))

    program = _check(with_gradients(weighted), sharded(-1, 2), replicated(3, 2))
    assert exchange_counts(program) == {"gather": 2, "sum": 1}


# ---- effects -----------------------------------------------------------------


def _in_a_branch(way, x, note):
    def noted():
        y = tf.numpy_function(note, [x], tf.float32)
        return tf.ensure_shape(y, (None, 3)) * 2

    return tf.cond(way[0], noted, noted)


def _in_a_loop(way, x, note):
    def each(i, y):
        z = tf.numpy_function(note, [x], tf.float32)
        return y + tf.ensure_shape(z, (None, 3))

    return _loop(1, each, (x,))


@pytest.mark.parametrize("function", [_in_a_branch, _in_a_loop])
def test_side_effects_in_branches_and_loops_happen_once(function):
    calls = []

    def note(x):
        calls.append(x.shape)
        return x

    check_on_towers(
        lambda way, x: function(way, x, note),
        _WAY,
        sharded(-1, 3),
        towers=((3, 0, 2),),
    )
    # One device, which is looked at as well, and all towers together.
    assert calls == [(5, 3)] * 3


def test_a_loop_reads_between_the_writes_around_it():
    graph = compat.FuncGraph("one_device")
    with graph.as_default():
        handle = tf.compat.v1.placeholder(tf.resource, ())
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
        o.level for o in program.operations if o.type == "AssignVariableOp"
    ]
    (loop,) = [o for o in program.operations if o.type == "While"]
    (after,) = [o for o in program.operations if o.type == "ReadVariableOp"]
    # Operations that are computed once come first in a level.
    assert first <= loop.level < last <= after.level
    assert loop.on_towers
