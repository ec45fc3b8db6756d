"""What a step draws from Python's and NumPy's random generators."""

import functools
import random

import keras
import numpy as np

import keras_towers as kt
from tests.kit.compare import assert_exact
from tests.kit.training import fit, linear


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    """Chooses while it is traced, as Keras's AugMix does."""

    def call(self, x):
        return x * (1 + random.random()) + np.random.random()


def test_towers_draw_what_one_device_does():
    def act(model):
        random.seed(3)
        np.random.seed(3)
        return fit(model)

    make = functools.partial(linear, Scaled())
    # What Python draws is drawn once for a graph.
    assert_exact(make, act, kt.TowerStrategy(2), in_graph=True)
