"""Loops on towers, against one device."""

import functools

import keras
import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.kit.long import some_of
from tests.partition.kit import (
    FEW,
    check,
    check_divided,
    kinds,
    once,
    part,
    rows,
    same,
    with_gradients,
)

L = keras.layers

_check = functools.partial(check_divided, towers=FEW)


def _while(going, round_, *start, **options):
    return tf.while_loop(going, round_, start, **options)


# ---- what goes round ---------------------------------------------------------


def _powers(x, w):
    return _while(
        lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y @ w) + x), 0, x
    )[1]


@pytest.mark.parametrize("seed", range(2))
def test_rows_go_round(seed):
    program = _check(_powers, rows(-1, 2), same(2, 2), seed=seed)
    assert kinds(program) == {"gather": 1}


def test_gradients_go_round():
    program = _check(with_gradients(_powers), rows(-1, 2), same(2, 2))
    assert kinds(program) == {"gather": 2, "sum": 1}
    assert program.levels == 1


def test_other_axes_and_blocks_of_rows_go_round():
    _check(with_gradients(_powers), rows(2, -1, 2), same(2, 2, 2))
    _check(with_gradients(_powers), rows(-1, 2, rows=2), same(2, 2))
    _check(_powers, rows(-1, 2, blocks=2), same(2, 2))
    _check(_powers, rows(-1, 2, blocks=2, rows=3), same(2, 2))


def test_what_all_have_becomes_rows():
    def add(x):
        zeros = tf.zeros((tf.shape(x)[0], 2))
        return _while(
            lambda i, y: i < 3, lambda i, y: (i + 1, y + x), 0, zeros
        )[1]

    _check(add, rows(-1, 2))


def test_what_all_have_becomes_part_of_a_sum():
    def add(x, y):
        return _while(
            lambda i, s: i < 3,
            lambda i, s: (i + 1, s + tf.reduce_sum(x, 0)),
            0,
            y,
        )

    program = _check(add, rows(-1, 2), same(2))
    assert kinds(program)["sum"] == 1


def test_rows_that_go_round_twice_as_late():
    # What goes round third gets rows in the third round only.
    def shift(x):
        a = tf.zeros((tf.shape(x)[0], 2))
        return _while(
            lambda i, a, b, c: i < 4,
            lambda i, a, b, c: (i + 1, x + a, a + 1.0, b * 2.0),
            0,
            a,
            a + 1.0,
            a + 2.0,
        )

    _check(with_gradients(lambda x: shift(x)[1:]), rows(-1, 2))


def test_known_numbers_are_not_known_in_later_rounds():
    def grow(x):
        # The axis is 1 in the first round only.
        def round_(axis, y):
            total = tf.reduce_sum(y, axis, keepdims=True)
            return 1 - axis, y + total

        return _while(
            lambda axis, y: tf.reduce_sum(axis) >= 0,
            round_,
            tf.constant(1),
            x,
            maximum_iterations=2,
        )[1]

    check(grow, rows(-1, 2), towers=FEW)


def test_shapes_that_grow():
    def grow(x):
        return _while(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, tf.concat([y, x], 1)),
            0,
            x,
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, None])),
        )[1]

    _check(grow, rows(-1, 2))


def test_rows_that_grow_are_computed_once():
    def grow(x):
        return _while(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, tf.concat([y, x], 0)),
            0,
            x,
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 2])),
        )[1]

    check(grow, rows(-1, 2), towers=FEW)


def test_a_loop_that_goes_on_by_the_batch_is_computed_once():
    def halve(x):
        return _while(
            lambda y: tf.reduce_sum(tf.abs(y)) > 0.1, lambda y: (y / 2,), x
        )

    program = check(halve, rows(-1, 2), towers=FEW)
    assert "StatelessWhile" in once(program)


def test_rounds_that_mix_examples_are_computed_once():
    def mix(x):
        return _while(
            lambda i, y: i < 2,
            lambda i, y: (i + 1, y - tf.reduce_mean(y, 0)),
            0,
            x,
        )[1]

    program = check(mix, rows(-1, 2), towers=FEW)
    assert "StatelessWhile" in once(program)


def test_a_sum_that_rounds_need_whole_is_summed_first():
    def scale(x, y):
        return _while(
            lambda i, z: i < 2, lambda i, z: (i + 1, z * tf.exp(y)), 0, x
        )[1]

    program = _check(scale, rows(-1, 2), part(2))
    assert kinds(program) == {"sum": 1, "gather": 1}


def test_the_number_of_examples_within_a_loop():
    def divide(x):
        def round_(i, y):
            n = tf.cast(tf.shape(y)[0], tf.float32)
            return i + 1, y / n + tf.ones_like(y) * tf.cast(i, tf.float32)

        return _while(lambda i, y: i < 2, round_, 0, x)[1]

    _check(divide, rows(-1, 2))


def test_rounds_as_many_as_examples():
    def often(x):
        return _while(
            lambda i, y: i < tf.shape(x)[0],
            lambda i, y: (i + 1, y * 0.5 + x),
            0,
            x,
        )[1]

    _check(with_gradients(often), rows(-1, 2))


def test_draws_with_seeds_within_a_loop():
    def noisy(x):
        def round_(i, y):
            noise = tf.random.stateless_uniform((3,), tf.stack([i, 7]))
            return i + 1, y * noise

        return _while(lambda i, y: i < 3, round_, 0, x)[1]

    _check(noisy, rows(-1, 3))


def test_what_has_an_effect_is_done_once():
    calls = []

    def note(i):
        calls.append(int(i))
        return i

    def count(x):
        def round_(i, y):
            j = tf.numpy_function(note, [i], tf.int32)
            j = tf.ensure_shape(j, ())
            return i + 1, y + tf.cast(j, tf.float32)

        return _while(lambda i, y: i < 2, round_, 0, x)[1]

    check(count, rows(-1, 2), towers=((3, 0, 2),))
    # One device, which is looked at as well, and all towers together.
    assert sorted(calls) == [0, 0, 0, 1, 1, 1]


def test_loops_within_loops_and_branches():
    def inner(y, w):
        return _while(
            lambda j, z: j < 2, lambda j, z: (j + 1, tf.tanh(z @ w)), 0, y
        )[1]

    def outer(x, w):
        def round_(i, y):
            z = tf.cond(i > 0, lambda: inner(y, w), lambda: y + x)
            return i + 1, z

        return _while(lambda i, y: i < 2, round_, 0, x)[1]

    _check(outer, rows(-1, 2), same(2, 2))
    _check(with_gradients(outer), rows(-1, 2), same(2, 2), tolerance=1e-4)


def test_loops_within_loops_leave_lists_of_lists():
    def outer(x, w):
        def round_(i, y):
            z = _while(
                lambda j, z: j < 2, lambda j, z: (j + 1, tf.tanh(z @ w)), 0, y
            )
            return i + 1, z[1] * x

        return _while(lambda i, y: i < 3, round_, 0, x)[1]

    _check(with_gradients(outer), rows(-1, 2), same(2, 2), tolerance=1e-4)


def test_functions_and_custom_gradients_within_loops():
    @tf.custom_gradient
    def clipped(x):
        return tf.exp(x), lambda dy: tf.clip_by_value(dy, -0.5, 0.5)

    @tf.function
    def step(x):
        return clipped(x * 0.3)

    def loop(x):
        return _while(
            lambda i, y: i < 3, lambda i, y: (i + 1, step(y) + x), 0, x
        )[1]

    _check(with_gradients(loop), rows(-1, 2))


def test_second_derivatives_of_loops():
    def penalty(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(_powers(x, w))
        return tape.gradient(y, x)

    given = rows(-1, 2), same(2, 2)
    check(with_gradients(penalty), *given, towers=FEW, tolerance=1e-4)


# ---- lists -------------------------------------------------------------------


def _scanned(x, w):
    """States of all times, of time-major rows."""
    steps = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x)
    states = tf.TensorArray(tf.float32, tf.shape(x)[0])

    def round_(i, state, states):
        state = tf.tanh(steps.read(i) @ w + state)
        return i + 1, state, states.write(i, state)

    going = lambda i, *_: i < tf.shape(x)[0]  # noqa: E731
    start = 0, tf.zeros_like(x[0]), states
    return _while(going, round_, *start)[2].stack()


def test_lists_of_rows_go_round():
    program = _check(_scanned, rows(3, -1, 2), same(2, 2))
    assert kinds(program) == {"gather": 1}
    program = _check(with_gradients(_scanned), rows(3, -1, 2), same(2, 2))
    assert kinds(program) == {"gather": 2, "sum": 1}


def test_gradients_of_a_list_that_all_have():
    def weighted(x, v):
        weights = tf.TensorArray(tf.float32, 3).unstack(v)
        return _while(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, tf.tanh(y * weights.read(i))),
            0,
            x,
        )[1]

    program = _check(with_gradients(weighted), rows(-1, 2), same(3, 2))
    assert kinds(program) == {"gather": 2, "sum": 1}


def test_lists_that_meet_what_has_no_rule_are_gathered():
    def sorted_(x, w):
        states = _scanned(x, w)
        items = tf.TensorArray(tf.float32, 3).unstack(states)
        return _while(
            lambda i, y: i < 3,
            # Examples are mixed.
            lambda i, y: (i + 1, y + tf.sort(items.read(i), 0)),
            0,
            x[0],
        )[1]

    program = check(sorted_, rows(3, -1, 2), same(2, 2), towers=FEW)
    assert once(program)["StatelessWhile"] == 1


def test_lists_of_which_not_all_is_set():
    def half(x):
        items = tf.TensorArray(tf.float32, 4, element_shape=(None, 2))
        found = _while(
            lambda i, items: i < 4,
            lambda i, items: (i + 2, items.write(i, x * tf.cast(i, x.dtype))),
            0,
            items,
        )
        return found[1].stack()

    _check(half, rows(-1, 2))
    _check(with_gradients(half), rows(-1, 2))


def test_loops_that_do_not_go_round():
    def none(x, often):
        items = tf.TensorArray(tf.float32, often[0], element_shape=(2, None, 2))
        items = items.unstack(tf.zeros((0, 2, tf.shape(x)[0], 2)))
        return _while(
            lambda i, y: i < often[0],
            lambda i, y: (i + 1, y + x),
            0,
            x,
        )[1]

    given = rows(-1, 2), same(1, dtype="int32", low=0, high=0)
    _check(with_gradients(lambda x, n: none(x, n)), *given)


# ---- variables ---------------------------------------------------------------


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
        y = _while(lambda i, y: i < 2, lambda i, y: (i + 1, y * read()), 0, x)
        write(tf.constant([1.0, 2.0]))
        again = read()
    graph.inputs = [handle, x]
    program = partition_graph(graph, [REPLICATED, Sharded(0)], [y[1], again])
    assert not once(program)
    first, last = [
        o.level for o in program.operations if o.type == "AssignVariableOp"
    ]
    (loop,) = [o for o in program.operations if o.type == "While"]
    (after,) = [o for o in program.operations if o.type == "ReadVariableOp"]
    # What is computed once comes first in a level.
    assert first <= loop.level < last <= after.level
    assert loop.on_towers


# ---- Keras -------------------------------------------------------------------


class _Masked(L.Layer):
    """A recurrent layer that is given a mask."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x, training=None):
        mask = tf.reduce_sum(x, -1) > 0
        return self.layer(x, mask=mask, training=training)


_STEPS = rows(-1, 3, 2)
_LAYERS = {
    "SimpleRNN": (lambda: L.SimpleRNN(2), _STEPS),
    "SimpleRNN backwards": (lambda: L.SimpleRNN(2, go_backwards=True), _STEPS),
    "LSTM": (lambda: L.LSTM(2, return_state=True), _STEPS),
    "LSTM sequences": (lambda: L.LSTM(2, return_sequences=True), _STEPS),
    "LSTM masked": (lambda: _Masked(L.LSTM(2)), _STEPS),
    "GRU": (lambda: L.GRU(2), _STEPS),
    "GRU masked": (
        lambda: _Masked(
            L.GRU(2, return_sequences=True, zero_output_for_mask=True)
        ),
        _STEPS,
    ),
    "GRU reset before": (lambda: L.GRU(2, reset_after=False), _STEPS),
    "recurrent dropout": (
        lambda: L.GRU(2, recurrent_dropout=0.4, seed=1),
        _STEPS,
    ),
    "dropout": (lambda: L.LSTM(2, dropout=0.4, seed=1), _STEPS),
    "Bidirectional": (lambda: L.Bidirectional(L.SimpleRNN(2)), _STEPS),
    "cells": (lambda: L.RNN([L.GRUCell(2), L.SimpleRNNCell(2)]), _STEPS),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(2)), _STEPS),
    "ConvLSTM1D": (lambda: L.ConvLSTM1D(2, 2), rows(-1, 2, 3, 2)),
}


@pytest.mark.parametrize("name", some_of(_LAYERS, 3))
def test_recurrent_layers_are_divided(name):
    make, given = _LAYERS[name]
    layer = make()
    layer.build((None, *given.shape[1:]))
    weights = [same(*variable.shape) for variable in layer.trainable_variables]
    others = [variable.numpy() for variable in layer.non_trainable_variables]

    def step(x, *weights):
        found, _ = layer.stateless_call(
            list(weights), [tf.constant(o) for o in others], x, training=True
        )
        return found

    program = _check(with_gradients(step), given, *weights, tolerance=1e-4)
    assert kinds(program)["sum"] == len(weights)
    assert program.levels == 1
