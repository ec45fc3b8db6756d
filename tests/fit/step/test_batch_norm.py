"""The statistics of BatchNormalization are those of one device."""

import contextlib
import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import fit, stacked

COUNT, BATCH = 26, 8  # the last batch has 2: none for a third tower
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
Norm, Dense = keras.layers.BatchNormalization, keras.layers.Dense
trained = functools.partial(fit, x=X, y=Y, batch_size=BATCH)


def test_options_of_the_layer_and_losses_before_and_after_it():
    def layers():
        penalty = keras.layers.ActivityRegularization
        return [
            *(Dense(7, "tanh"), penalty(l2=0.5)),
            *(Norm(momentum=0.8, renorm=True), Dense(5, "relu")),
            *(Norm(momentum=0.8, center=False, scale=False), penalty(l2=0.1)),
            *(Norm(trainable=False), Dense(3, activity_regularizer="l2")),
        ]

    def act(model):
        history = trained(model, epochs=2)
        return history, model.evaluate(X, Y, batch_size=COUNT, verbose=0)

    assert_exact(stacked(layers), act, kt.TowerStrategy(3))


def test_a_bias_before_it_differs_by_rounding_with_adam_as_by_the_order():
    make = stacked(
        lambda: [Dense(7), Norm(), Dense(3)],
        optimizer=keras.optimizers.Adam,
    )

    def weights(order, strategy):
        model = make()
        with strategy:
            for _ in range(4):
                model.train_on_batch(X[order], Y[order])
        return model.get_weights()

    order = np.arange(COUNT)
    one = weights(order, contextlib.nullcontext())
    for other in (
        weights(order[::-1], contextlib.nullcontext()),
        weights(order, kt.TowerStrategy(2)),
    ):
        pairs = zip(one, other, strict=True)
        apart = [np.abs(a - b).max() for a, b in pairs]
        # The bias, and the moving mean, which follows it.
        follow = apart.pop(4), apart.pop(1)
        assert max(follow) > 1e-5 > max(apart)


@pytest.mark.core
def test_far_from_zero_and_eagerly():
    """Where mean(x^2) - mean(x)^2 would cancel."""
    act = functools.partial(trained, x=np.float32(1000) + X)
    make = stacked(lambda: [Norm(), Dense(3)], run_eagerly=True)
    strategy = kt.ParameterServerTowerStrategy(3)
    # The examples themselves are rounded to 6e-5.
    assert_exact(make, act, strategy, tolerance=1e-4)


def test_masks_and_a_synchronized_layer():
    sentences = m.SENTENCES[:COUNT].copy()
    # Of one tower's part, and of a whole batch, nothing is left.
    sentences[:3] = sentences[8:16] = 0
    embedding = functools.partial(keras.layers.Embedding, 14, 5, mask_zero=True)
    make = stacked(
        lambda: [embedding(), Norm(synchronized=True), Dense(3)], (4,)
    )
    act = functools.partial(trained, x=sentences, y=m.SENTENCE_LABELS[:COUNT])
    assert_exact(make, act, kt.TowerStrategy(3), tolerance=1e-5)
