"""Reading and writing variables, split and whole."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.splitting.interpreter import Interpreter
from keras_towers.splitting.nodes import Layouts
from keras_towers.splitting.values import Kind, handle
from keras_towers.splitting.values import same as same_value
from keras_towers.splitting.values import total as total_value
from tests.splitting.kit import TOWERS, Given, rows, same
from tests.splitting.kit_numbers import check_parts, made

_SUM, _MEAN, _SAME = total_value(), total_value(-1), same_value()


def _after(function, first, *given):
    """Check what a variable is after a step; return what is said of it."""
    held = Given(first, (4, 3))
    variable = tf.Variable(tf.zeros([4, 3]))

    @tf.function(autograph=False)
    def step(*values):
        function(variable, *values)

    trace = step.get_concrete_function(*(g.spec for g in given))
    interpreter = Interpreter({"v": first})
    inputs = [g.described for g in given] + [handle("v")]
    interpreter.run(trace.graph, inputs)
    value = interpreter.state.get("v", first)
    for counts in TOWERS:
        generator = np.random.default_rng(0)
        tensors = [
            made(g, counts, generator, Layouts().order) for g in (held, *given)
        ]
        found = []
        for start, *arrays in zip(
            *([m.whole, *m.parts] for m in tensors), strict=True
        ):
            variable.assign(start)
            trace(*map(tf.constant, arrays))
            found.append(variable.numpy())
        check_parts(value, found[0], found[1:], counts)
    return value


_ROWS = rows(-1, 3)
_PLACES = rows(-1, dtype="int32", low=0, high=3)


def _wide(row):
    return row + tf.zeros([4, 3])


def test_a_moving_average():
    def step(variable, x):
        mean = tf.reduce_mean(x, 0)
        variable.assign(variable * 0.9 + mean * 0.1)

    assert _after(step, _SAME, _ROWS).degree == -1
    assert _after(step, _MEAN, _ROWS).degree == -1
    assert _after(step, _SUM, _ROWS).kind is Kind.OTHER


@pytest.mark.parametrize("first", [_SAME, _MEAN, _SUM])
@pytest.mark.parametrize("change", ["assign_add", "assign_sub"])
@pytest.mark.parametrize("combine", [tf.reduce_mean, tf.reduce_sum])
def test_added(first, change, combine):
    def step(variable, x):
        getattr(variable, change)(_wide(combine(x, 0)))

    value = _after(step, first, _ROWS)
    fits = (first is _SUM) == (combine is tf.reduce_sum)
    assert (value.kind is not Kind.OTHER) == fits


def test_a_count_of_examples():
    def step(variable, x):
        count = tf.cast(tf.shape(x)[0], tf.float32)
        variable.assign_add(tf.fill([4, 3], count))

    assert _after(step, _SUM, _ROWS).degree == 0
    assert _after(step, _SAME, _ROWS).kind is Kind.OTHER


@pytest.mark.parametrize("name", ["scatter_add", "scatter_sub"])
def test_rows_that_are_added_by_indices(name):
    def step(variable, places, x):
        getattr(variable, name)(tf.IndexedSlices(x, places))

    assert _after(step, _SUM, _PLACES, _ROWS).degree == 0
    assert _after(step, _SAME, _PLACES, _ROWS).kind is Kind.OTHER


@pytest.mark.parametrize("name", ["update", "max", "min", "mul", "div"])
def test_rows_that_are_written_by_indices(name):
    def step(variable, places, x):
        method = getattr(variable, f"scatter_{name}")
        method(tf.IndexedSlices(x, places))

    assert _after(step, _SAME, _PLACES, _ROWS).kind is Kind.OTHER
    fixed = same(2, dtype="int32", low=0, high=3)
    others = same(2, 3, low=0.5)
    assert _after(step, _SAME, fixed, others).is_same
    # The rows that are left are those of each tower.
    assert _after(step, _SUM, fixed, others).kind is Kind.OTHER


def test_rows_that_are_read_by_indices():
    def step(variable, places):
        rows = tf.gather(variable, places)
        variable.assign_add(_wide(tf.reduce_sum(rows, 0)))

    assert _after(step, _SUM, _PLACES).kind is Kind.OTHER
    assert _after(step, _MEAN, _PLACES).kind is Kind.OTHER

    def mean(variable, places):
        rows = tf.gather(variable, places)
        variable.assign(_wide(tf.reduce_mean(rows, 0)))

    assert _after(mean, _SAME, _PLACES).degree == -1


def test_a_write_in_a_branch():
    def step(variable, x, c):
        tf.cond(
            c > 0,
            lambda: variable.assign_add(tf.ones([4, 3])),
            lambda: variable.assign_add(tf.zeros([4, 3])),
        )

    assert _after(step, _SAME, _ROWS, same()).is_same

    def by_examples(variable, x):
        step(variable, x, tf.reduce_sum(x))

    assert _after(by_examples, _SAME, _ROWS).kind is Kind.OTHER


def _in_rounds(rounds):
    def step(variable, x):
        def body(k):
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
    def write(variable, x):
        variable.assign_add(_wide(tf.reduce_sum(x, 0)))

    assert _after(write, _SUM, _ROWS).degree == 0
