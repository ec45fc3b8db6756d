"""A ``fit`` that is measured trains as one that is not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.traces import written
from tests.kit.training import STEPS, X, Y, classifier, fit

MODELS = {
    "momentum": (classifier, {}),
    "several steps at once": (
        lambda: classifier(steps_per_execution=3),
        {},
    ),
    "layers that draw": (
        lambda: classifier(keras.layers.Dropout(0.3)),
        {},
    ),
    "each tower traces": (
        lambda: classifier(keras.layers.Lambda(draws)),
        {},
    ),
    "validation": (classifier, {"validation_data": (X[:20], Y[:20])}),
}


def draws(x):
    """Draws by TensorFlow, whose seed is the number of operations before."""
    return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_same_without(path, name):
    make, options = MODELS[name]

    def trained(*callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = make()
        with kt.TowerStrategy(4):
            history = fit(model, 2, callbacks=callbacks, **options)
            weights = model.get_weights()
            if name != "each tower traces":
                # What is traced anew draws by TensorFlow from the beginning.
                fit(model, 1)
        return [*weights, *model.get_weights()], history

    weights, history = trained(kt.Timeline(path))
    wanted, expected = trained()
    assert history == expected
    for found, weight in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(found, weight)
    assert len(written(path)["compute"]) == 2 * STEPS * 4
