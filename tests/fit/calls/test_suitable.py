"""Models that are made for one number of rows train as on one device."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.kit.compare import assert_exact

random = np.random.default_rng(0)
X = random.normal(size=(12, 3, 3)).astype("float32")
Y = random.normal(size=(12, 2)).astype("float32")


def recurrent(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3, 3), batch_size=4),
            keras.layers.SimpleRNN(2, **options),
        ]
    )
    model.compile("sgd", "mse")
    return model


class Fixed(keras.layers.Layer):
    """Computes with the size of the batch that it was built for."""

    def build(self, shape):
        self.rows = shape[0]

    def call(self, x):
        return keras.ops.reshape(x, (self.rows, -1))[:, :2]


def fixed():
    inputs = keras.Input((3, 3), batch_size=4)
    keras.utils.set_random_seed(1)
    outputs = Fixed()(keras.layers.Dense(3)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


def act(model):
    options = {"batch_size": 4, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, **options)
    return [
        history.history,
        model.evaluate(X, Y, **options),
        model.predict(X, **options),
    ]


@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("unroll", [False, True])
def test_a_state_for_each_row_of_the_batch(towers, unroll):
    def stateful():
        return recurrent(stateful=True, unroll=unroll)

    assert_exact(stateful, act, kt.TowerStrategy(towers))


@pytest.mark.parametrize("make", [recurrent, fixed])
def test_a_fixed_size_of_the_batch(make):
    assert_exact(make, act, kt.TowerStrategy(3))
