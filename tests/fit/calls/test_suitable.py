"""Models that cannot run on parts of a batch are refused before they train."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.kit.compare import assert_exact

X = np.ones((8, 5, 3), "float32")
Y = np.ones((8, 2), "float32")


def recurrent(batch_size=None, **kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((5, 3), batch_size=batch_size),
            keras.layers.LSTM(2, **kwargs),
        ]
    )
    model.compile("sgd", "mse")
    return model


def refused(model, match, kind="fit", **options):
    before = model.get_weights()
    data = {"fit": (X, Y), "evaluate": (X, Y), "predict": (X,)}[kind]
    with pytest.raises(kt.TowerError, match=match), kt.TowerStrategy(2):
        getattr(model, kind)(*data, batch_size=4, verbose=0, **options)
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    # It trains as ever on one device.
    model.fit(X, Y, batch_size=4, verbose=0)


@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict"])
def test_stateful(kind):
    refused(recurrent(4, stateful=True), "stateful.*one device", kind)


def test_fixed_batch_size():
    # Most layers run on parts of it all the same.
    assert_exact(
        lambda: recurrent(4),
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
    inputs = keras.Input((5, 3), batch_size=4)
    model = keras.Model(inputs, Fixed()(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(Exception) as caught, kt.TowerStrategy(2):
        model.predict(X, batch_size=4, verbose=0)
    (note,) = caught.value.__notes__
    assert "exactly 4 rows" in note and "without batch_size" in note


def test_one_tower_runs_them():
    model = recurrent(4, stateful=True)
    with kt.TowerStrategy(1):
        model.fit(X, Y, batch_size=4, verbose=0)
