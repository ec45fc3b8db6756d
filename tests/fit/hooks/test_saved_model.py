"""A model that ``tf.saved_model.load`` loads inside the block."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close
from tests.kit.training import X, fit, linear


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained model, and the folder that it was exported to."""
    folder = str(tmp_path_factory.mktemp("saved"))
    model = linear()
    fit(model)
    model.export(folder, verbose=False)
    return model, folder


def test_its_functions_inside_and_after(saved):
    model, folder = saved
    wanted = model.predict(X, verbose=0)
    with kt.TowerStrategy(2) as towers:
        loaded = tf.saved_model.load(folder)
        close(loaded.serve(X), wanted)
        close(tf.function(loaded.serve)(X), wanted)
        close(towers.run(loaded.serve, (X,)).values[1], wanted)
        signature = loaded.signatures["serving_default"]
        (output,) = signature(tf.constant(X)).values()
        close(output, wanted)
    close(loaded.serve(X), wanted)


def features(folder):
    """Trains on what a saved model gives, and trains that, too."""
    inputs = keras.Input((6,))
    layer = keras.layers.TFSMLayer(
        folder, call_endpoint="serve", trainable=True
    )
    keras.utils.set_random_seed(1)
    model = keras.Model(inputs, keras.layers.Dense(3)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.1), m.cross_entropy())
    return model


def test_as_a_layer_of_a_model_made_before(saved):
    """Every tower traces the step by itself."""
    _, folder = saved
    strategy = kt.TowerStrategy(2)
    assert_exact(lambda: features(folder), fit, strategy)
