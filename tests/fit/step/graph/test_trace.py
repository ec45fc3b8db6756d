"""The trace of a step on one device: what it needs, captures and returns."""

import keras
import pytest
import tensorflow as tf

from keras_towers.fit.step.graph.trace import (
    trace,
)
from keras_towers.foundation.errors import TowerError

ROWS = tf.TensorSpec([None, 3])


def traced(step, batch=ROWS):
    return trace(step, batch, "predict", None)


@pytest.fixture
def variables():
    return [tf.Variable(tf.ones([3]), name=name) for name in "uvw"]


def names_of(trace):
    """The captured variables among what is needed."""
    return [outside for _, outside in trace.needed_captures]


def is_same(found, variables):
    wanted = [id(variable.handle) for variable in variables]
    return [id(handle) for handle in found] == wanted


def test_results_are_the_tensors_of_the_output():
    def step(data):
        x, y = data
        assert y is None
        return {"twice": 2 * x, "none": None, "pair": (x, x + 1)}

    made = traced(step, (ROWS, None))
    assert [t.name for t in made.results] == [t.name for t in made.wanted]
    assert len(made.results) == 3
    output = made.output_with(["a", "b", "c"])
    assert output == {"twice": "c", "none": None, "pair": ("a", "b")}


def test_what_is_needed(variables):
    """Not what is only printed, nor what a function takes but does not use."""
    shown, read, written = variables

    @tf.function
    def ignores(x, other):
        return x + 0 * read

    def step(x):
        tf.print("shown", shown)
        written.assign_add(tf.reduce_sum(x, 0))
        return ignores(x, shown.read_value())

    made = traced(step)
    assert is_same(names_of(made), [written, read]) or is_same(
        names_of(made), [read, written]
    )
    assert is_same(made.written, [written])
    needed = {operation.type for operation in made.needed}
    assert "PrintV2" not in needed
    assert {"AssignAddVariableOp", "Mul"} <= needed


def test_what_a_function_writes_is_needed(variables):
    kept, *_ = variables

    @tf.function
    def keep(x):
        kept.assign(tf.reduce_max(x, 0))

    def step(x):
        keep(x)
        return x * 2

    made = traced(step)
    assert is_same(names_of(made), [kept])
    assert is_same(made.written, [kept])


def test_a_branch_needs_what_either_function_uses(variables):
    one, other, outside = variables

    def step(x):
        return tf.cond(
            tf.reduce_sum(x) > 0, lambda: x * one, lambda: x - other
        ) + tf.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0)

    assert {*map(id, names_of(traced(step)))} == {
        id(variable.handle) for variable in (one, other)
    }
    assert outside.handle not in names_of(traced(lambda x: x))


def test_variables_outside_of_a_model(variables):
    own, shown, _ = variables
    words = tf.Variable(["a"], shape=[1])
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])

    def step(x):
        tf.print(shown, words)
        return model(x) * own + tf.cast(words[0] == "a", x.dtype)

    assert is_same(traced(step).variables_outside(model), [words, own])


def test_a_value_that_is_known_only_when_the_step_runs():
    def step(x):
        graph = tf.compat.v1.get_default_graph()
        later = graph.capture_call_time_value(
            lambda: tf.ones([3]), tf.TensorSpec([3])
        )
        return x + later

    with pytest.raises(TowerError, match="Pass it as part of the batch"):
        traced(step)
