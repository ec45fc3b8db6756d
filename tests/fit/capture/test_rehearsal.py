"""What is not proven is rehearsed on a few examples, and told if need be."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import settings
from tests.fit.step.acts import Acts
from tests.kit import training
from tests.kit.compare import assert_exact

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(44, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCH = 16
REHEARSED = "rehearsed, and on"


def bessel_of_each(x):
    """What no rule is known of, although it is of each entry."""
    return x + tf.math.special.bessel_j0(x)


def first_positive_of_all(x):
    """Every example meets the first of the batch that is positive."""
    values, _ = tf.unique(tf.stop_gradient(x[:, 0]))
    return x + values[values > 0][:1, None]


def with_the_sum_of_all(x):
    values, _ = tf.unique(tf.stop_gradient(x[:, 0]))
    return x + tf.reduce_sum(values)


def model_of(function, *layers, optimizer="adam", loss="mse", **compiled):
    keras.utils.set_random_seed(0)
    ends = keras.layers.Dense(4), keras.layers.Dense(1)
    model = keras.Sequential(
        [keras.Input((4,)), ends[0], *layers, Acts(function), ends[1]]
    )
    model.compile(optimizer, loss, metrics=["mae"], **compiled)
    return model


fit = functools.partial(training.fit, x=X, y=Y)


def fitted(strategy, *layers, **options):
    with strategy:
        fit(model_of(*layers, **options))


@pytest.mark.parametrize("options, steps", [({}, 3), ({"random": "global"}, 1)])
def test_what_is_equal_in_it_is_not_told(logged, options, steps):
    strategy = kt.TowerStrategy(3, **options)
    assert_exact(
        lambda: model_of(bessel_of_each, steps_per_execution=steps),
        lambda model: fit(model, validation_data=(X[:20], Y[:20])),
        strategy,
        tolerance=1e-5,
    )
    assert not logged("step of")
    described = strategy.describe()
    assert described.count(REHEARSED) == 2, described
    assert "not proven to be that of one device" in described


def test_what_differs_in_it_is_told_with_the_line_and_the_size(logged):
    strategy = kt.TowerStrategy(3)
    fitted(strategy, first_positive_of_all)
    assert "differs from that of one device" in strategy.describe()
    ((_, said),) = logged("step of")
    assert "differs: it" in said and "In a rehearsal on 6 examples" in said
    assert "values, _ = tf.unique(" in said
    assert "keras_towers.gather" in said


def test_what_fails_for_a_part_of_the_examples_is_told(logged):
    x = np.where(np.arange(len(X)) % 6 == 0, 1.0, -1.0)[:, None] * np.abs(X)
    model = keras.Sequential(
        [Acts(first_positive_of_all), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    with kt.TowerStrategy(2):
        fit(model, x=x, batch_size=12)
    ((_, said),) = logged("step of")
    assert "may differ: it" in said
    assert "a part of them failed alone (InvalidArgumentError)" in said


@pytest.mark.parametrize("exact", [False, True])
def test_what_differs_by_design_is_not_compared(logged, exact):
    """With ``exact``, towers exchange it."""
    strategy = kt.TowerStrategy(3, exact=exact)
    by_design = [
        keras.layers.Dropout(0.4, seed=1),
        keras.layers.BatchNormalization(),
        keras.layers.GaussianNoise(0.1, seed=2),
    ]
    fitted(strategy, bessel_of_each, *by_design)
    assert not logged("step of")
    assert REHEARSED in strategy.describe()


def test_what_differs_beside_exchanges_is_told(logged):
    norm = keras.layers.BatchNormalization()
    fitted(kt.TowerStrategy(3, exact=True), with_the_sum_of_all, norm)
    ((_, said),) = logged("step of")
    assert "In a rehearsal on 6 examples the difference" in said


def test_what_has_effects_is_not_rehearsed(logged):
    said = []

    def say(number):
        said.append(number)
        return number

    def noting(x):
        number = tf.numpy_function(say, [1.0], tf.float32)
        return bessel_of_each(x) * tf.ensure_shape(number, [])

    strategy = kt.TowerStrategy(2)
    fitted(strategy, noting)
    # Once for each batch.
    assert len(said) == 3
    ((_, told),) = logged("may differ")
    assert "keras_towers.verify" in told
    assert REHEARSED not in strategy.describe()


def test_what_shows_nothing_is_told(logged):
    """A loss whose gradients are zero is equal however it is computed."""

    def flat(y_true, y_pred):
        return tf.reduce_mean(bessel_of_each(y_pred) * 0.0, -1)

    strategy = kt.TowerStrategy(2)
    fitted(strategy, tf.identity, loss=flat)
    assert len(logged("may differ")) == 1
    # Nor does what is no number, as where gradients overflow in float16.
    half = keras.layers.Dense(4, dtype="mixed_float16")
    overflows = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=1e30
    )
    fitted(strategy, bessel_of_each, half, optimizer=overflows)
    assert len(logged("may differ: it")) == 2


def test_what_is_too_slow_or_has_too_few_examples_is_told(logged, monkeypatch):
    with kt.TowerStrategy(3):
        fit(model_of(bessel_of_each), batch_size=4)
    assert len(logged("may differ")) == 1
    monkeypatch.setattr(settings, "REHEARSED_TRACE_S", 0.0)
    fitted(kt.TowerStrategy(3), first_positive_of_all)
    assert len(logged("may differ")) == 2


def test_other_methods(logged):
    strategy = kt.TowerStrategy(3)
    with strategy:
        model = model_of(bessel_of_each)
        model.train_on_batch(X, Y)
        assert strategy.describe().count(REHEARSED) == 1
        outputs = model.predict(X, batch_size=BATCH, verbose=0)
        assert strategy.describe().count(REHEARSED) == 2
        model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        assert strategy.describe().count(REHEARSED) == 3
    np.testing.assert_allclose(outputs, model(X), rtol=1e-5, atol=1e-6)
    assert not logged("step of")


def test_a_prediction_that_differs(logged):
    with kt.TowerStrategy(3):
        model = model_of(first_positive_of_all)
        model.predict(X, batch_size=BATCH, verbose=0)
    ((_, said),) = logged("prediction step of")
    assert "In a rehearsal on 6 examples" in said
