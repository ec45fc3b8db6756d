"""Settings in words that are the same on all ranks that have them."""

import functools

import keras
import numpy as np
import pytest

from keras_towers.fit.rank_agreement import _compiled, describe_setting
from tests.kit.training import linear

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
    lambda: "x" * 1000,
    lambda: "x" * 999 + "y",
)


def test_only_equal_settings_have_equal_descriptions():
    """Long ones are cut."""
    words, again = (
        [describe_setting(make()) for make in SETTINGS] for _ in range(2)
    )
    assert words == again
    alike = [word for word in words if words.count(word) > 1]
    assert not alike
    assert max(map(len, words)) < 120


class NotSerializable(keras.optimizers.SGD):
    def get_config(self):
        raise NotImplementedError


@pytest.mark.parametrize("optimizer", [NotSerializable, lambda: None])
def test_any_compiled_object_is_described_in_words(optimizer):
    model = linear()
    model.compile("sgd", lambda y, p: y - p)
    model.optimizer = optimizer()
    found = _compiled(model)
    assert all(isinstance(value, str) for value in found.values())
