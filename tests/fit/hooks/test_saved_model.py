"""A model that ``tf.saved_model.load`` loads inside the block."""

import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import close
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
