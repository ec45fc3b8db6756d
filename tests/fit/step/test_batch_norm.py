"""``batch_norm="global"``: the statistics are those of one device."""

import contextlib

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import compiled

COUNT, BATCH = 26, 8  # the last batch has 2: none for a third tower
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
IMAGES = np.random.RandomState(0).randn(COUNT, 4, 4, 3).astype("float32")
NAMES = (
    *("kernel", "bias", "gamma", "beta", "moving mean", "moving variance"),
    *("next kernel", "next bias"),
)
Norm, Dense = keras.layers.BatchNormalization, keras.layers.Dense


def fitting(x=X, y=Y, epochs=1):
    return lambda model: model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0
    )


def making(layers, **options):
    """A function that makes a compiled model, the same every time."""

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(layers())

    return compiled(build, **options)


def test_options_of_the_layer_and_losses_before_and_after_it():
    """Towers take turns at the statistics, on the same layer objects."""

    def layers():
        penalty = keras.layers.ActivityRegularization
        return [
            *(keras.Input((6,)), Dense(7, "tanh"), penalty(l2=0.5)),
            *(Norm(momentum=0.8, renorm=True), Dense(5, "relu")),
            *(Norm(momentum=0.8, center=False, scale=False), penalty(l2=0.1)),
            *(Norm(trainable=False), Dense(3, activity_regularizer="l2")),
        ]

    def act(model):
        history = fitting(epochs=2)(model).history
        norms = [layer for layer in model.layers if isinstance(layer, Norm)]
        for norm in norms:
            assert type(norm) is Norm and not norm.synchronized
            for value in (v._value for v in norm.variables):
                first, *others = getattr(value, "values", [value])
                for other in others:
                    np.testing.assert_array_equal(other, first)
        return history, model.evaluate(X, Y, batch_size=COUNT, verbose=0)

    # Which includes batch_norm="global".
    found = assert_exact(making(layers), act, kt.TowerStrategy(3, exact=True))
    assert found.model.layers[2].get_config()["synchronized"] is False


def test_a_bias_before_it_differs_by_rounding_with_adam_as_by_the_order():
    make = making(
        lambda: [keras.Input((6,)), Dense(7), Norm(), Dense(3)],
        optimizer=keras.optimizers.Adam,
        run_eagerly=True,
    )

    def trained(order, strategy):
        model = make()
        with strategy:
            for _ in range(4):
                model.train_on_batch(X[order], Y[order])
        return dict(zip(NAMES, model.get_weights(), strict=True))

    order = np.arange(COUNT)
    one = trained(order, contextlib.nullcontext())
    for other in (
        trained(order[::-1], contextlib.nullcontext()),
        trained(order, kt.TowerStrategy(2, exact=True)),
    ):
        apart = {name: np.abs(one[name] - other[name]).max() for name in NAMES}
        follow = apart.pop("bias"), apart.pop("moving mean")
        assert max(follow) > 1e-5 > max(apart.values())


@pytest.mark.core
@pytest.mark.parametrize(
    "strategy", [kt.TowerStrategy, kt.ParameterServerTowerStrategy]
)
def test_far_from_zero_and_eagerly(strategy):
    """Where mean(x^2) - mean(x)^2 would cancel."""
    act = fitting(np.float32(1000) + X)
    make = making(
        lambda: [keras.Input((6,)), Norm(), Dense(3)], run_eagerly=True
    )
    # The examples themselves are rounded to 6e-5.
    assert_exact(make, act, strategy(3, batch_norm="global"), tolerance=1e-4)


def test_masks_and_a_synchronized_layer():
    sentences = m.SENTENCES[:COUNT].copy()
    # Of one tower's part, and of a whole batch, nothing is left.
    sentences[:3] = sentences[8:16] = 0
    make = making(
        lambda: [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(14, 5, mask_zero=True),
            *(Norm(synchronized=True), Dense(3)),
        ]
    )
    act = fitting(sentences, m.SENTENCE_LABELS[:COUNT])
    assert_exact(make, act, kt.TowerStrategy(3), tolerance=1e-5)


def test_convolutions_in_half_precision():
    """With a residual connection, and a norm over another axis."""

    def build():
        keras.utils.set_random_seed(1)
        layers, half = keras.layers, {"dtype": "mixed_float16"}
        inputs = keras.Input((4, 4, 3))
        x = layers.Conv2D(4, 1, use_bias=False, **half)(inputs)
        shortcut = x = layers.ReLU(6.0, **half)(Norm(axis=1, **half)(x))
        x = layers.DepthwiseConv2D(3, padding="same", **half)(x)
        x = layers.Add(**half)([Norm(**half)(x), shortcut])
        return keras.Model(inputs, Dense(3)(layers.GlobalAveragePooling2D()(x)))

    strategy = kt.TowerStrategy(3, batch_norm="global")
    assert_exact(compiled(build), fitting(IMAGES), strategy, tolerance=5e-3)
