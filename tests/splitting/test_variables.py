"""Reading and writing variables, split and whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.splitting.interpreter import Interpreter
from keras_towers.splitting.nodes import Layouts
from keras_towers.splitting.values import Kind, Value, handle
from keras_towers.splitting.values import same as same_value
from keras_towers.splitting.values import total as total_value
from tests.splitting.kit import Given, rows, same
from tests.splitting.kit_numbers import assert_alike, made, whole_of

_TOWERS = ((5, 2), (2, 3, 1))
_SUM, _MEAN, _SAME = total_value(), total_value(-1), same_value()


def _after(function: Any, first: Value, *given: Given) -> Value:
    """Check what a variable is after a step; return what is said of it."""
    held = Given(first, (4, 3))
    variable = tf.Variable(tf.zeros([4, 3]))

    @tf.function(autograph=False)
    def step(*values: Any) -> Any:
        function(variable, *values)

    trace = step.get_concrete_function(*(g.spec for g in given))
    graph: Any = trace.graph
    interpreter = Interpreter({"v": first})
    inputs = [g.described for g in given] + [handle("v")]
    interpreter.run(graph, inputs)
    value = interpreter.state.get("v", first)
    for towers in _TOWERS:
        generator = np.random.default_rng(0)
        tensors = [
            made(g, towers, generator, Layouts().order) for g in (held, *given)
        ]

        def run(start: Any, *arrays: Any) -> Any:
            variable.assign(start)
            trace(*map(tf.constant, arrays))
            return variable.numpy()

        whole = run(*(tensor.whole for tensor in tensors))
        parts = [
            run(*(tensor.parts[k] for tensor in tensors))
            for k in range(len(towers))
        ]
        expected = whole_of(value, parts, towers, 3e-4, str(value))
        if expected is not None:
            assert_alike(whole, expected, 3e-4, str(value))
    return value


_ROWS = rows(-1, 3)
_PLACES = rows(-1, dtype="int32", low=0, high=3)


def _add_mean(variable: Any, x: Any) -> None:
    variable.assign_add(tf.reduce_mean(x, 0) + tf.zeros([4, 3]))


def _add_sum(variable: Any, x: Any) -> None:
    variable.assign_add(tf.reduce_sum(x, 0) + tf.zeros([4, 3]))


def _subtract_sum(variable: Any, x: Any) -> None:
    variable.assign_sub(tf.reduce_sum(x, 0) + tf.zeros([4, 3]))


def test_a_moving_average():
    def step(variable: Any, x: Any) -> None:
        mean = tf.reduce_mean(x, 0)
        variable.assign(variable * 0.9 + mean * 0.1)

    assert _after(step, _SAME, _ROWS).degree == -1
    assert _after(step, _MEAN, _ROWS).degree == -1
    assert _after(step, _SUM, _ROWS).kind is Kind.OTHER


@pytest.mark.parametrize("first", [_SAME, _MEAN, _SUM])
@pytest.mark.parametrize("step", [_add_mean, _add_sum, _subtract_sum])
def test_added(first, step):
    value = _after(step, first, _ROWS)
    fits = (first is _SUM) == (step is not _add_mean)
    assert (value.kind is not Kind.OTHER) == fits


def test_a_count_of_examples():
    def step(variable: Any, x: Any) -> None:
        count = tf.cast(tf.shape(x)[0], tf.float32)
        variable.assign_add(tf.fill([4, 3], count))

    assert _after(step, _SUM, _ROWS).degree == 0
    assert _after(step, _SAME, _ROWS).kind is Kind.OTHER


@pytest.mark.parametrize("name", ["scatter_add", "scatter_sub"])
def test_rows_that_are_added_by_indices(name):
    def step(variable: Any, places: Any, x: Any) -> None:
        getattr(variable, name)(tf.IndexedSlices(x, places))

    assert _after(step, _SUM, _PLACES, _ROWS).degree == 0
    assert _after(step, _SAME, _PLACES, _ROWS).kind is Kind.OTHER


@pytest.mark.parametrize("name", ["update", "max", "min", "mul", "div"])
def test_rows_that_are_written_by_indices(name):
    def step(variable: Any, places: Any, x: Any) -> None:
        method = getattr(variable, f"scatter_{name}")
        method(tf.IndexedSlices(x, places))

    assert _after(step, _SAME, _PLACES, _ROWS).kind is Kind.OTHER
    fixed = same(2, dtype="int32", low=0, high=3)
    others = same(2, 3, low=0.5)
    assert _after(step, _SAME, fixed, others).is_same
    # The rows that are left are those of each tower.
    assert _after(step, _SUM, fixed, others).kind is Kind.OTHER


def test_rows_that_are_read_by_indices():
    def step(variable: Any, places: Any) -> None:
        rows = tf.gather(variable, places)
        variable.assign_add(tf.reduce_sum(rows, 0) + tf.zeros([4, 3]))

    assert _after(step, _SUM, _PLACES).kind is Kind.OTHER
    assert _after(step, _MEAN, _PLACES).kind is Kind.OTHER

    def mean(variable: Any, places: Any) -> None:
        rows = tf.gather(variable, places)
        variable.assign(tf.reduce_mean(rows, 0) + tf.zeros([4, 3]))

    assert _after(mean, _SAME, _PLACES).degree == -1


def test_a_write_in_a_branch():
    def step(variable: Any, x: Any, c: Any) -> None:
        tf.cond(
            c > 0,
            lambda: variable.assign_add(tf.ones([4, 3])),
            lambda: variable.assign_add(tf.zeros([4, 3])),
        )

    assert _after(step, _SAME, _ROWS, same()).is_same

    def by_examples(variable: Any, x: Any) -> None:
        step(variable, x, tf.reduce_sum(x))

    assert _after(by_examples, _SAME, _ROWS).kind is Kind.OTHER


def _in_rounds(rounds: Any) -> Any:
    def step(variable: Any, x: Any) -> None:
        def body(k: Any) -> Any:
            change = variable.assign_add(tf.ones([4, 3]))
            with tf.control_dependencies([change.op]):
                return k + 1

        tf.while_loop(lambda k: k < rounds(x), body, (tf.constant(1),))

    return step


def test_a_write_in_a_loop():
    assert _after(_in_rounds(lambda x: 3), _SAME, _ROWS).is_same
    by_batch = _in_rounds(lambda x: tf.shape(x)[0])
    assert _after(by_batch, _SAME, _ROWS).kind is Kind.OTHER


def test_a_write_in_a_function():
    @tf.function(autograph=False)
    def write(variable: Any, x: Any) -> None:
        variable.assign_add(tf.reduce_sum(x, 0) + tf.zeros([4, 3]))

    assert _after(write, _SUM, _ROWS).degree == 0
