"""Settings in words that are the same in all processes that have them."""

import keras
import numpy as np
import pytest

from keras_towers.fit.ranks import plain_settings
from tests.kit.training import linear

pytestmark = pytest.mark.core
D = keras.layers
VALUES = (
    lambda: None,
    lambda: 0.1,
    lambda: "mse",
    lambda: [keras.losses.Huber(0.5), "mae"],
    lambda: [keras.losses.Huber(0.25), "mae"],
    lambda: keras.losses.mean_squared_error,
    lambda: {"a": keras.losses.MeanSquaredError(name="a name of its own")},
    lambda: np.arange(3),
    lambda: {0: 1.0, 1: 2.0},
    lambda: {0: 1.0, 1: 3.0},
    lambda: object(),
    lambda: lambda x: x,
)


def test_only_equal_values_have_equal_words():
    words, again = (
        [plain_settings.in_words(make()) for make in VALUES] for _ in range(2)
    )
    assert words == again
    assert len({*words}) == len(words)
    ordered, other = {"a": 1, "b": np.float64(2)}, {"b": 2.0, "a": 1}
    assert plain_settings.in_words(ordered) == plain_settings.in_words(other)


def differing(one, other):
    """The settings of two models that differ."""
    found = [plain_settings.of_model(model) for model in (one, other)]
    names = found[0].keys() | found[1].keys()
    return {n for n in names if found[0].get(n) != found[1].get(n)}


def stacked(*layers):
    return keras.Sequential([keras.Input((4, 2)), *layers])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda k: D.Dense(2, "relu", name=f"mine_{k}"), None),
        (lambda k: D.Dropout(0.5, seed=k), None),
        (lambda k: D.Dense(2, kernel_initializer=["zeros", "ones"][k]), None),
        (lambda k: D.Dense(2, ["relu", "tanh"][k]), "activation"),
        (
            lambda k: D.Dense(
                2, kernel_regularizer=keras.regularizers.L2(0.1 + k)
            ),
            "kernel_regularizer",
        ),
        (lambda k: D.Dense(2, dtype=["float32", "mixed_float16"][k]), "dtype"),
        (lambda k: D.Dropout(0.25 + k / 2), "rate"),
        (lambda k: D.BatchNormalization(momentum=0.5 + k / 4), "momentum"),
    ],
)
def test_a_setting_of_a_layer_is_named(make, said):
    found = differing(*(stacked(make(k)) for k in range(2)))
    assert {name.partition(" of layer 1 (")[0] for name in found} == (
        {said} if said else set()
    )


def test_a_model_that_is_built_has_the_same_settings():
    models = [
        keras.Sequential([D.Dense(2), keras.Sequential([D.Dense(3)])])
        for _ in range(2)
    ]
    models[1].build((None, 4))
    assert differing(*models) == set()


def test_frozen_layers_and_policies_are_described():
    model = keras.Sequential([D.Dense(2), D.Dense(3, dtype="mixed_float16")])
    model.layers[1].trainable = False
    for _ in range(2):
        assert plain_settings.of_layers(model) == {
            "dtype policies": "['float32', 'mixed_float16']",
            "trainable of layer 2 (Dense)": "False",
        }
        model.build((None, 4))


def test_all_optimizers_are_described():
    def made(momentum, initial_scale=2.0):
        model = linear()
        inner = keras.optimizers.SGD(0.1, momentum)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale))
        model.of_others = [keras.optimizers.Adam(0.1 + momentum)]
        return model

    assert differing(made(0.25), made(0.5)) == {
        "momentum of the optimizer",
        "learning_rate of optimizer 3",
    }
    assert differing(made(0.25), made(0.25, 4.0)) == {
        "initial_scale of optimizer 2"
    }


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Says nothing of itself, as many in scripts."""

    def __init__(self, first):
        self.first = first

    def __call__(self, step):
        return self.first


class NotSerializable(keras.optimizers.SGD):
    def get_config(self):
        raise NotImplementedError


def test_an_optimizer_without_a_configuration_has_its_class_and_schedule():
    models = [linear() for _ in range(2)]
    for model, first in zip(models, (0.1, 0.2), strict=True):
        model.compile(NotSerializable(Schedule(first)), "mse")
    assert differing(*models) == {"first of the schedule of the optimizer"}
    model.compile(None)
    assert plain_settings.of_optimizers(model)["optimizer"] == "NoneType"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"loss_weights": [2.0]}, "loss weights"),
        ({"weighted_metrics": ["mae"]}, "weighted metrics"),
    ],
)
def test_how_losses_and_metrics_are_weighted_counts(options, said):
    models = [stacked(D.Dense(2)) for _ in range(2)]
    for model, own in zip(models, ({}, options), strict=True):
        model.compile("sgd", "mse", **own)
    assert differing(*models) == {said}
