"""Models that cannot run on parts of a batch are refused before they train."""

import keras
import numpy as np
import pytest

import keras_towers as kt

X = np.ones((8, 5, 3), "float32")
Y = np.ones((8, 2), "float32")


def recurrent(batch_size=None, **kwargs):
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


@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict"])
def test_fixed_batch_size(kind):
    refused(recurrent(4), "exactly 4 rows.*batch_size=None", kind)


def test_a_fixed_size_that_every_tower_gets():
    model = recurrent(4)
    with kt.TowerStrategy(2, batches="each"):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_one_tower_runs_them():
    model = recurrent(4, stateful=True)
    with kt.TowerStrategy(1):
        model.fit(X, Y, batch_size=4, verbose=0)
