"""Executions of many steps, whose first batches are inspected."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.running import memory_retries
from keras_towers.fit.step.running.adaptive_function import AdaptiveFunction
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_exact
from tests.kit.training import X, linear

pytestmark = pytest.mark.alternate

STEPS = 12


class Noting(keras.layers.Layer):
    """Notes how many batches are read when a step runs, and when it is traced.

    Args:
        read: the batches that are read.
        steps: for each step, how many they were.
        traces: the shapes for which it was traced.
    """

    def __init__(self, read, steps, traces):
        super().__init__()
        self.note = lambda: steps.append(len(read))
        self.traces = traces

    def call(self, x):
        if isinstance(x, tf.Tensor):
            self.traces.append(x.shape)
            tf.py_function(self.note, [], [])
        return x


def noting():
    """Return a function that makes models, and what these note."""
    read, steps, traces = notes = [], [], []

    def make():
        for noted in notes:
            noted.clear()
        keras.utils.set_random_seed(3)
        layers = [
            Noting(*notes),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential([keras.Input((None, 6)), *layers])
        loss = m.cross_entropy()
        model.compile(m.momentum(), loss, steps_per_execution=STEPS)
        return model

    return make, read, steps, traces


def test_an_execution_is_not_read_before_it_runs():
    """Padded sequences; the data end within an execution."""
    make, read, steps, _ = noting()

    def draw():
        for number in range(2 * STEPS - 3):
            read.append(number)
            rows, length = 5 - number % 3, 1 + number % 4
            x = np.resize(X, (rows, length, 6))
            yield x, np.arange(rows, dtype="int32") % 3

    x, y = tf.TensorSpec([None, None, 6]), tf.TensorSpec([None], tf.int32)

    def act(model):
        data = tf.data.Dataset.from_generator(draw, output_signature=(x, y))
        trained = model.fit(data, epochs=2, verbose=0, validation_data=data)
        return trained.history, model.evaluate(data, verbose=0)

    assert_exact(make, act, kt.TowerStrategy(2), in_graph=True)
    assert steps[0] < STEPS / 2


def test_a_cancelled_step_is_not_repeated_in_silence(monkeypatch):
    runs, said = [], []

    def cancelled(self, data):
        runs.append(data)
        raise tf.errors.CancelledError(None, None, "by something")

    monkeypatch.setattr(AdaptiveFunction, "_run_once", cancelled)
    monkeypatch.setattr(memory_retries, "announce", said.append)
    with (
        kt.TowerStrategy(2, micro_batches="auto"),
        pytest.raises(tf.errors.CancelledError),
    ):
        linear().fit(X, X[:, :1], verbose=0)
    assert 1 < len(runs) == len(said) + 1
    assert all("cancelled" in line for line in said)


def test_steps_that_keras_unrolls_are_traced_once():
    make, _, steps, traces = noting()
    x = np.resize(X, (4 * STEPS - 1, 3, 6))

    def act(model):
        return model.predict(x, batch_size=4, verbose=0)

    assert_exact(make, act, kt.TowerStrategy(2), in_graph=True)
    assert len(steps) == STEPS
    # The first one, those that follow, and one of fewer rows.
    assert len(traces) <= 3
