"""Branches, compiled functions and effects on towers, against one device."""

import pytest
import tensorflow as tf

from keras_towers.partition.layout.rules.control_flow import own_mean
from tests.partition import kit
from tests.partition.layout_list import as_listed

pytestmark = pytest.mark.alternate

_WAY = kit.replicated(1, dtype="bool")


# ---- branches ----------------------------------------------------------------


def _branches(x, w):
    return lambda: tf.tanh(x @ w), lambda: tf.exp(x) @ tf.ones((3, 2))


def _rows_or_zeros(x):
    zeros = tf.zeros((tf.shape(x)[0], 3))
    return lambda: x, lambda: zeros + 1


def _either_of_sum_and_whole(way, x, y):
    return tf.cond(way[0], lambda: tf.reduce_sum(x, 0), lambda: y)


def _whole_of_a_sum(way, x, y):
    return tf.cond(way[0], lambda: x * tf.exp(y), lambda: x)


def _either_of_rows_and_sum(way, x, y):
    return tf.cond(way[0], lambda: tf.exp(x), lambda: y)


def _by_the_batch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1)


def _known(x):
    return tf.cond(tf.constant(True) & (tf.rank(x) > 1), lambda: x, lambda: -x)


_X, _SUM = kit.sharded(-1, 3), kit.partial_sum(3)
BRANCHES = {
    "gradients": (
        kit.with_gradients(
            lambda way, *given: tf.cond(way[0], *_branches(*given))
        ),
        *(_WAY, _X, kit.replicated(3, 2)),
    ),
    "rows, or what all have": (
        lambda way, x: tf.cond(way[0], *_rows_or_zeros(x)),
        *(_WAY, _X),
    ),
    "a part of a sum, or what all have": (
        *(_either_of_sum_and_whole, _WAY, _X, kit.replicated(3)),
    ),
    "a sum of which the whole is needed": (_whole_of_a_sum, _WAY, _X, _SUM),
    "a choice by the batch, the same for all towers": (_by_the_batch, _X),
}
test_branches = as_listed(
    "control flow: branches", BRANCHES, exchanges=True, towers=3 * kit.FEW
)


def test_a_branch_of_rows_and_partial_sums_is_computed_once():
    given = _WAY, _X, kit.partial_sum(1, 3)
    program = kit.check_on_towers(
        _either_of_rows_and_sum, *given, towers=2 * ((2, 0, 0),)
    )
    assert "StatelessIf" in kit.computed_once(program)


def test_a_branch_that_is_known_takes_the_place_of_the_choice():
    program = kit.check_divided(_known, _X, towers=kit.FEW)
    assert not any("If" in o.type for o in program.operations)


# ---- functions that XLA compiles ---------------------------------------------

_compiled = tf.function(jit_compile=True)


@_compiled
def _grouped(x, w):
    # Without XLA it has no gradient on a CPU.
    return tf.nn.convolution(x, w, padding="SAME")


@_compiled
def _drawn(x):
    # XLA draws other numbers than TensorFlow.
    shape = (tf.shape(x)[0], 3)
    return x + tf.random.stateless_truncated_normal(shape, (5, 6))


def _loop(x, w):
    def each(k, y):
        return k + 1, tf.ensure_shape(_grouped(y, w), x.shape)

    return tf.while_loop(lambda k, y: k < 2, each, (0, x))[1]


def _branch(x, w):
    is_large = tf.reduce_sum(w) > 0
    return tf.cond(is_large, lambda: _grouped(x, w), lambda: x)


_CONVOLUTIONS = {
    "forward and backward": _grouped,
    "in another function": tf.function(lambda x, w: 2 * _grouped(x, w)),
    "around another one": _compiled(lambda x, w: _grouped(tf.exp(x), w)),
    "in a loop": _loop,
    "in a branch": _branch,
}


@_compiled
def _centered(x):
    return x - tf.reduce_mean(x, 0)


FUNCTIONS = {
    **{
        name: (
            kit.with_gradients(function),
            *(kit.sharded(-1, 4, 4, 4), kit.replicated(3, 3, 1, 4)),
        )
        for name, function in _CONVOLUTIONS.items()
    },
    "draws": (_drawn, _X),
    "a sum": (_compiled(lambda x: tf.reduce_sum(tf.exp(x), 0)), _X),
    "a sum of which the whole is needed": (
        _compiled(lambda x, y: x * tf.exp(y)),
        *(_X, _SUM),
    ),
    # With an exchange, one device computes it for all.
    "centered": (_centered, _X),
}
test_a_compiled_function_stays_compiled = as_listed(
    "control flow: functions", FUNCTIONS, exchanges=True
)


def test_what_xla_compiles_with_the_rest_is_inlined():
    program = kit.check_divided(_centered, _X, towers=kit.FEW, xla=True)
    assert kit.exchange_counts(program) == {"sum": 1, "gather": 1}


# ---- means of a tower's rows -------------------------------------------------


def test_without_towers_a_tower_s_mean_is_that_of_all_rows():
    rows = tf.constant([[1.0, 2.0], [3.0, 6.0], [5.0, 7.0]])
    weights = tf.constant([[1.0, 0.0], [0.0, 2.0], [2.0, 4.0]])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        means = own_mean(rows)
    assert means.numpy().tolist() == [[3.0, 5.0]] * 3
    gradient = tape.gradient(means, rows, weights)
    assert gradient.numpy().tolist() == [[1.0, 2.0]] * 3


# ---- effects -----------------------------------------------------------------


def _in_a_branch(way, x, note):
    def noted():
        y = tf.numpy_function(note, [x], tf.float32)
        return tf.ensure_shape(y, (None, 3)) * 2

    return tf.cond(way[0], noted, noted)


def _in_a_loop(way, x, note):
    def each(i, y):
        z = tf.numpy_function(note, [x], tf.float32)
        return i + 1, y + tf.ensure_shape(z, (None, 3))

    return tf.while_loop(lambda i, _: i < 1, each, (0, x))[1]


@pytest.mark.parametrize("function", [_in_a_branch, _in_a_loop])
def test_side_effects_in_branches_and_loops_happen_once(function):
    calls = []

    def note(x):
        calls.append(x.shape)
        return x

    kit.check_on_towers(
        lambda way, x: function(way, x, note),
        _WAY,
        kit.sharded(-1, 3),
        towers=((3, 0, 2),),
    )
    # One device, which is looked at as well, and all towers together.
    assert calls == [(5, 3)] * 3
