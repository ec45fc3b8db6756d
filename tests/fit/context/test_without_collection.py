import gc

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.context.without_collection import without_collection


def test_a_step_is_traced_without_collections():
    """Also one that fails leaves the collector on."""
    states = []

    class Model(keras.Model):
        fails = False

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            states.append(gc.isenabled())
            if self.fails:
                raise ValueError("of the model")
            return self.dense(x)

    x = np.ones((4, 2), "float32")
    model = Model()
    model.compile("sgd", "mse")
    with kt.TowerStrategy(2):
        model.fit(x, x, verbose=0)
        assert states[-1] is False and gc.isenabled()
        model.fails = True
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="of the model"):
            model.fit(x, x, verbose=0)
    assert states[-1] is False and gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
