"""BatchNormalization takes the statistics of the global batch."""

import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_exact
from tests.kit.training import fit, stacked

pytestmark = pytest.mark.alternate

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


@pytest.mark.core
def test_statistics_far_from_zero():
    """Where mean(x^2) - mean(x)^2 would cancel."""
    act = functools.partial(trained, x=np.float32(1000) + X)
    make = stacked(lambda: [Norm(), Dense(3)])
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
