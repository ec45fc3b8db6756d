"""Settings in words that are the same on all ranks that have them."""

import functools

import keras
import numpy as np
import pytest

from keras_towers.fit.calls.alike import _compiled, described

pytestmark = pytest.mark.core


SETTINGS = (
    lambda: None,
    lambda: 0.1,
    lambda: "mse",
    lambda: "mae",
    lambda: [keras.losses.Huber(0.5), "mae"],
    lambda: [keras.losses.Huber(0.25), "mae"],
    lambda: keras.losses.mean_squared_error,
    lambda: {"a": keras.losses.MeanSquaredError(name="a name of its own")},
    lambda: keras.optimizers.schedules.CosineDecay(0.1, 100),
    lambda: np.arange(3),
    lambda: np.arange(1, 4),
    lambda: {0: 1.0, 1: 2.0},
    lambda: {0: 1.0, 1: 3.0},
    lambda: object(),
    lambda: functools.partial(print, sep=""),
    lambda: lambda x, y: x - y,
    lambda: lambda x, y: x + y,
    lambda: lambda x, y: x - 2 * y,
)


def test_equal_settings_have_equal_words_and_others_others():
    words = [[described(make()) for make in SETTINGS] for _ in range(2)]
    assert words[0] == words[1]
    assert len(set(words[0])) == len(SETTINGS)


def test_long_settings_are_cut_and_still_differ():
    one, other = described("x" * 1000), described("x" * 999 + "y")
    assert one != other
    assert len(one) < 120


class NotSerializable(keras.optimizers.SGD):
    def get_config(self):
        raise NotImplementedError


def compiled(optimizer):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer or "sgd", lambda y, p: y - p)
    if optimizer is None:
        model.optimizer = None
    return _compiled(model)


def test_whatever_is_compiled():
    for optimizer in ("adam", NotSerializable(), None):
        found = compiled(optimizer)
        assert all(isinstance(value, str) for value in found.values())


def test_rates_are_apart_from_other_settings():
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.25)
    )
    for optimizer in (keras.optimizers.SGD(0.5, momentum=0.25), scaled):
        found = compiled(optimizer)
        assert found["learning_rate"] == "0.5"
        assert found["momentum of the optimizer"] == "0.25"
