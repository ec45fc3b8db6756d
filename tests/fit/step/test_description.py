"""What ``describe()`` says of the steps that ran."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step import description
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import Sharded

X = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
Y = X[:, :3]


def costs(function, shape):
    """What a function of rows costs two towers, which is no update."""
    spec = tf.TensorSpec(shape, tf.float32)
    graph = tf.function(function).get_concrete_function(spec).graph
    program = partition_graph(graph, [Sharded(0)], graph.outputs)
    return description.costs_of(program, 2)


def steps_of(strategy):
    """The lines of ``describe()`` about steps, but for what is once."""
    lines = [line.strip() for line in strategy.describe().splitlines()]
    return [line for line in lines if " of '" in line]


@pytest.mark.parametrize(
    ("function", "shape", "fixed", "per_example"),
    [
        # Rows are gathered.
        (lambda x: 2 * x, (None, 5), 0, 20),
        (lambda x: 2 * x, (6, 500), 6 * 2000, 0),
        # Every example has several: in two blocks, or one after another.
        (lambda x: 2 * tf.concat([x, x], 0), (None, 5), 0, 40),
        (lambda x: tf.reshape(x, (-1, 2)), (None, 6), 0, 24),
        (lambda x: tf.reduce_sum(x, 0), (None, 5), 20, 0),
        # Each of two towers gives its own.
        (lambda x: tf.reduce_max(x, 0), (None, 5), 2 * 20, 0),
        (lambda x: tf.constant(1.0), (None, 5), 0, 0),
        # How many rows there are, the batch decides.
        (lambda x: tf.boolean_mask(x, x[:, 0] > 0), (None, 5), None, 0),
    ],
)
def test_bytes_that_are_exchanged(function, shape, fixed, per_example):
    found = costs(function, shape)
    assert (found.fixed, found.per_example) == (fixed, per_example)
    assert not found.once


def test_what_is_said_of_exchanges():
    for function, said in (
        (lambda x: 2 * x, "1 exchange in 1 round, 20 bytes x N"),
        (lambda x: tf.constant(1.0), "0 exchanges in 0 rounds, 0 bytes"),
        (lambda x: tf.boolean_mask(x, x[:, 0] > 0), ", ? bytes"),
    ):
        assert costs(function, (None, 5)).exchange_summary.endswith(said)


def test_rounds():
    def standardized(x):
        mean = tf.reduce_mean(x, 0)
        return tf.reduce_mean((x - mean) ** 2, 0), tf.reduce_sum(x)

    found = costs(standardized, (None, 5))
    assert (found.exchanges, found.rounds) == (3, 2)
    assert found.fixed == 20 + 20 + 4


def test_what_is_computed_once():
    def median(x):
        ranked = tf.sort(x, 0)
        return 2 * ranked[3]

    found = costs(median, (None, 5))
    (line,) = found.once
    assert line.endswith("ranked = tf.sort(x, 0)")
    assert line.startswith("test_description.py:")
    assert 0 < found.once[line] < 1
    (said,) = found.once_summary
    assert said.startswith(f"computed once for all towers: {line} (")


class Ranked(keras.Model):
    """Its loss is that of the sorted predictions."""

    def __init__(self):
        super().__init__(name="ranked")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        ranked = tf.sort(y_pred[:, 0])
        return tf.reduce_mean(ranked * tf.range(0.0, 1, 1 / len(X)))


def test_a_model(logged):
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3)], name="plain"
    )
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    with kt.TowerStrategy(2) as strategy:
        assert steps_of(strategy) == []
        model.fit(data, verbose=0)
        model.evaluate(data, verbose=0)
        model.predict(data, verbose=0)
    training, evaluation, prediction = steps_of(strategy)
    # The gradients of 18 weights, and the loss.
    assert training == ("training of 'plain': 3 exchanges in 1 round, 76 bytes")
    assert evaluation == (
        "evaluation of 'plain': 1 exchange in 1 round, 4 bytes"
    )
    assert prediction == (
        "prediction of 'plain': 1 exchange in 1 round, 12 bytes x N"
    )
    assert not logged("once")


def test_what_a_model_computes_once_is_said_once(logged):
    for _ in range(2):
        model = Ranked()
        model.compile("sgd")
        with kt.TowerStrategy(2) as strategy:
            model.fit(X, Y, len(X), verbose=0)
    ((level, line),) = logged("once")
    assert level == "INFO"
    start = "training of 'ranked': computed once for all towers: test_descr"
    assert line.startswith(start)
    assert "ranked = tf.sort(y_pred[:, 0]) (" in line
    assert line in steps_of(strategy)
