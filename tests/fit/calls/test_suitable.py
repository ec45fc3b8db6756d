"""Models that cannot run on parts of a batch are refused before they train."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.kit.compare import assert_exact

X = np.ones((8, 3, 3), "float32")
Y = np.ones((8, 2), "float32")


def recurrent(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3, 3), batch_size=4),
            keras.layers.SimpleRNN(2, unroll=True, **options),
        ]
    )
    model.compile("sgd", "mse")
    return model


def test_stateful():
    model = recurrent(stateful=True)
    before = model.get_weights()
    for kind, data in (
        ("fit", (X, Y)),
        ("evaluate", (X, Y)),
        ("predict", (X,)),
    ):
        with (
            pytest.raises(kt.TowerError, match="stateful.*one device"),
            kt.TowerStrategy(2),
        ):
            getattr(model, kind)(*data, batch_size=4, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)
    # It trains as ever on one device, and on one tower.
    model.fit(X, Y, batch_size=4, verbose=0)
    with kt.TowerStrategy(1):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_fixed_batch_size():
    # Most layers run on parts of it all the same.
    assert_exact(
        recurrent,
        lambda model: model.fit(X, Y, batch_size=4, shuffle=False, verbose=0),
        kt.TowerStrategy(2),
    )


class Fixed(keras.layers.Layer):
    """Computes with the size of the batch that it was built for."""

    def build(self, shape):
        self.rows = shape[0]

    def call(self, x):
        return keras.ops.reshape(x, (self.rows, -1))[:, :2]


def test_an_error_tells_of_a_fixed_batch_size():
    inputs = keras.Input((3, 3), batch_size=4)
    model = keras.Model(inputs, Fixed()(inputs))
    with pytest.raises(Exception) as caught, kt.TowerStrategy(2):
        model.predict(X, batch_size=4, verbose=0)
    (note,) = [n for n in caught.value.__notes__ if "rows" in n and "4" in n]
    assert "exactly 4 rows" in note and "without batch_size" in note
