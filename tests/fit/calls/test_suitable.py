"""Models that were built for batches of one size train as on one device."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.fit.step.acts import Acts
from tests.kit.compare import assert_exact

X = np.random.default_rng(0).normal(size=(8, 3, 3)).astype("float32")
Y = np.ones((8, 2), "float32")


class Fixed(keras.layers.Layer):
    """Computes with the size of the batch that it was built for."""

    def build(self, shape):
        self.rows = shape[0]

    def call(self, x):
        return keras.ops.reshape(x, (self.rows, -1))[:, :2]


LAYERS = {
    "recurrent": lambda: keras.layers.SimpleRNN(2, unroll=True),
    # It keeps a state for each row.
    "stateful": lambda: keras.layers.SimpleRNN(2, stateful=True),
    "stateful, unrolled": lambda: keras.layers.LSTM(
        2, stateful=True, unroll=True
    ),
    "reshaping": Fixed,
    # What each tower draws is of its own rows.
    "drawing": lambda: Acts(
        lambda x: x + keras.random.normal((x.shape[0], 1, 3), seed=3)
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_fixed_batch_size(kind):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3, 3), batch_size=4)
        hidden = keras.layers.Flatten()(LAYERS[kind]()(inputs))
        outputs = keras.layers.Dense(2)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    def act(model):
        options = {"batch_size": 4, "verbose": 0}
        history = model.fit(X, Y, shuffle=False, epochs=2, **options).history
        evaluated = model.evaluate(X, Y, **options)
        return history, evaluated, model.predict(X, **options)

    assert_exact(make, act, kt.TowerStrategy(3))
