"""The step is analysed before it runs, and what differs is told once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import settings
from tests.fit.step.acts import Stepping
from tests.kit import training
from tests.kit.compare import assert_exact

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
Dense = keras.layers.Dense


fit = functools.partial(training.fit, x=X, y=Y, batch_size=8)


def _largest(y_true, y_pred):
    return tf.reduce_max(tf.abs(y_true - y_pred))


def _root_mean_square(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


def _model(*layers, loss="mse", metrics=None):
    model = keras.Sequential([keras.Input((4,)), *layers, Dense(1)])
    model.compile("sgd", loss, metrics=metrics)
    return model


def test_metrics_that_were_built_in_a_step_on_one_device(logged):
    model, strategy = _model(metrics=["mae"]), kt.TowerStrategy(2)
    fit(model)
    with strategy:
        fit(model)
    assert not logged("step of")
    assert "proven to be that of one device" in strategy.describe()


def test_what_differs_is_told_once_with_the_line_and_the_remedy(logged):
    with kt.TowerStrategy(2):
        model = _model(loss=_largest)
        fit(model)
        fit(model)
    ((_, said),) = logged("takes the largest value of the batch")
    assert "test_verdict.py:" in said
    assert "return tf.reduce_max(tf.abs(y_true - y_pred))" in said
    assert "gradients" in said
    assert "keras_towers.gather" in said


def test_what_differs_is_an_error_or_ignored_where_that_is_wanted(logged):
    model = _model(loss=_largest)
    before = model.get_weights()
    with (
        pytest.raises(kt.TowerError, match="largest value of the batch"),
        kt.TowerStrategy(2, on_difference="error"),
    ):
        fit(model)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    with kt.TowerStrategy(2, on_difference="ignore"):
        fit(model)
    assert not logged("largest value")


@pytest.mark.parametrize("exact", [False, True])
def test_batch_norm_and_dropout_hide_no_other_difference(
    exact, logged, monkeypatch
):
    """A metric that is no mean is told, and has nothing to do with weights."""
    monkeypatch.setattr(settings, "METRIC_BYTES", 0)
    monkeypatch.setattr(settings, "JOINING_TRACES", 0)
    norm, dropout = keras.layers.BatchNormalization, keras.layers.Dropout
    layers = Dense(6), norm(), dropout(0.3, seed=1)
    with kt.TowerStrategy(2, exact=exact):
        fit(_model(*layers, metrics=[_root_mean_square]))
    ((_, said),) = logged("step of")
    assert "Sqrt" in said
    assert "metrics" in said
    assert "gradients" not in said
    assert "0 KiB" in said


class Penalized(Stepping):
    """Punishes slopes, with gradients of gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                output = self(x, training=True)
            slope = inner.gradient(output, x)
            loss = self.compute_loss(x, y, output)
            loss += tf.reduce_mean(tf.square(slope))
        weights = self.trainable_variables
        self.update(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, output)


def test_gradients_of_gradients_through_own_statistics(logged):
    def make():
        keras.utils.set_random_seed(1)
        inner = _model(keras.layers.BatchNormalization(), Dense(5, "tanh"))
        model = Penalized(*inner.inputs, *inner.outputs)
        model.compile("sgd", "mse")
        return model

    # Both towers have the statistics of the batch.
    alike = np.tile(X[:4], (2, 1)), Y[:8]
    act = functools.partial(fit, x=alike[0], y=alike[1])
    assert_exact(make, act, kt.TowerStrategy(2))
    assert not logged("step of")
    assert not logged("traces the step")
