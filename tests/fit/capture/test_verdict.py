"""The step is analysed before it runs, and what differs is told once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import settings

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def fit(model):
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)


def _largest(y_true, y_pred):
    return tf.reduce_max(tf.abs(y_true - y_pred))


def _root_mean_square(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


def _model(loss="mse", metrics=None):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", loss, metrics=metrics)
    return model


def test_an_ordinary_step_is_proven_and_nothing_is_said(logged):
    strategy = kt.TowerStrategy(2)
    with strategy:
        fit(_model(metrics=["mae"]))
    assert not logged("step of")
    assert "proven to be that of one device" in strategy.describe()


def test_metrics_that_were_built_in_a_step_on_one_device(logged):
    model = _model(metrics=["mae"])
    fit(model)
    strategy = kt.TowerStrategy(2)
    with strategy:
        fit(model)
    assert not logged("step of")
    assert "proven to be that of one device" in strategy.describe()


def test_what_differs_is_told_once_with_the_line_and_the_remedy(logged):
    with kt.TowerStrategy(2):
        model = _model(_largest)
        fit(model)
        fit(model)
    ((_, said),) = logged("takes the largest value of the batch")
    assert "test_verdict.py:" in said
    assert "return tf.reduce_max(tf.abs(y_true - y_pred))" in said
    assert "gradients" in said
    assert "keras_towers.gather" in said


@pytest.fixture
def metrics_stay_sums(monkeypatch):
    monkeypatch.setattr(settings, "METRIC_BYTES", 0)
    monkeypatch.setattr(settings, "JOINING_TRACES", 0)


def test_a_metric_that_is_no_mean_is_told(logged, metrics_stay_sums):
    with kt.TowerStrategy(2):
        fit(_model(metrics=[_root_mean_square]))
    ((_, said),) = logged("Sqrt")
    assert "metrics" in said
    assert "gradients" not in said
    assert "0 KiB" in said


def test_an_error_leaves_the_model_as_it_was():
    model = _model(_largest)
    before = model.get_weights()
    with (
        pytest.raises(kt.TowerError, match="largest value of the batch"),
        kt.TowerStrategy(2, on_difference="error"),
    ):
        fit(model)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_differences_are_ignored_where_that_is_wanted(logged):
    with kt.TowerStrategy(2, on_difference="ignore"):
        fit(_model(_largest))
    assert not logged("largest value")


def test_what_is_not_known_is_not_called_a_difference(logged):
    def rounded(y_true, y_pred):
        (error,) = tf.numpy_function(
            lambda x: np.abs(x), [y_true - y_pred], [y_pred.dtype]
        )
        error = tf.ensure_shape(error, y_pred.shape)
        return tf.reduce_mean(tf.square(y_true - y_pred) + 0 * error)

    strategy = kt.TowerStrategy(2)
    with strategy:
        fit(_model(rounded))
    assert "proven to be" not in strategy.describe()


@pytest.mark.parametrize("exact", [False, True])
def test_batch_norm_and_dropout_hide_no_other_difference(
    exact, logged, metrics_stay_sums
):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", metrics=[_root_mean_square])
    with kt.TowerStrategy(2, exact=exact):
        fit(model)
    ((_, said),) = logged("step of")
    assert "Sqrt" in said


class Penalized(keras.Sequential):
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
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, output)


def test_gradients_of_gradients_through_own_statistics(logged):
    def trained():
        keras.utils.set_random_seed(1)
        model = Penalized(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(5, "tanh"),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        model.fit(halves, Y[:8], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    # Both towers have the statistics of the batch.
    halves = np.tile(X[:4], (2, 1))
    one = trained()
    with kt.TowerStrategy(2):
        two = trained()
    assert not logged("step of")
    assert not logged("traces the step")
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
