"""A ``fit`` that is measured trains as one that is not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.long import some_of
from tests.kit.traces import written
from tests.kit.training import STEPS, X, Y, fit, linear


def draws(x):
    """Draws by TensorFlow, whose seed is the number of operations before."""
    return x + tf.random.normal(tf.shape(x))


# Marks must not change what TensorFlow's graph optimizer fuses.
@pytest.mark.optimized
@pytest.mark.parametrize("each_tower_traces", some_of([True, False]))
def test_weights_are_the_same_without(path, each_tower_traces):
    def trained(*callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        if each_tower_traces:
            model, options = linear(keras.layers.Lambda(draws)), {}
        else:
            drops = keras.layers.Dropout(0.3)
            model = linear(drops, steps_per_execution=3)
            options = {"validation_data": (X[:20], Y[:20])}
        with kt.TowerStrategy(2):
            history = fit(model, 2, callbacks=callbacks, **options)
            weights = model.get_weights()
            if not each_tower_traces:
                # What is traced anew draws by TensorFlow from the beginning.
                fit(model)
        return [*weights, *model.get_weights()], history

    weights, history = trained(kt.Timeline(path))
    wanted, expected = trained()
    assert history == expected
    for found, weight in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(found, weight)
    assert len(written(path)["compute"]) == 2 * STEPS * 2
