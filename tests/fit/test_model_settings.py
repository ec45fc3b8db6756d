"""Settings in words that are the same on all ranks that have them."""

import functools

import keras
import numpy as np
import pytest

from keras_towers.fit.model_settings import (
    Words,
    compiled,
    differing_layer,
    layers,
)
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
    lambda: functools.partial(print, sep="-"),
    lambda: keras.DTypePolicy("float32"),
    lambda: keras.DTypePolicy("bfloat16"),
    lambda: lambda x, y: x - y,
    lambda: lambda x, y: x + y,
    lambda: lambda x, y: x - 2 * y,
    lambda: "x" * 1000,
    lambda: "x" * 999 + "y",
)


def test_only_equal_settings_have_equal_descriptions():
    """Long ones are cut."""
    words, again = (
        [Words().cut(make()) for make in SETTINGS] for _ in range(2)
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
    words = Words()
    found = compiled(model, words)
    assert all(isinstance(value, str) for value in found.values())
    assert words.unread == ({"NotSerializable"} if model.optimizer else set())


def _unlike(*makes):
    """What ranks say of the layers that each of them makes."""
    models = [keras.Sequential([keras.Input((4, 2)), m()]) for m in makes]
    return differing_layer([layers(model, Words()) for model in models])


class Unread(keras.layers.Layer):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate()


D, INITIALIZERS = keras.layers, keras.initializers
ALIKE = (
    # The second one's name counts the first.
    lambda k: D.Dense(2, "relu"),
    lambda k: D.Dense(2, "relu", name=f"mine_{k}"),
    lambda k: D.Dropout(0.5, seed=k),
    lambda k: D.Dense(2, kernel_initializer=["zeros", "ones"][k]),
    lambda k: D.Dense(2, bias_initializer=INITIALIZERS.Constant(k)),
    lambda k: D.TimeDistributed(
        D.Dense(2, kernel_initializer=INITIALIZERS.RandomNormal(0, k + 1))
    ),
    lambda k: D.Dense(2, lambda x: x * 2),
    lambda k: D.Lambda(lambda x: x * 2),
    lambda k: Unread(lambda: 1),
)
UNLIKE = (
    (lambda k: D.Dense(2, ["relu", "tanh"][k]), "activation", "tanh"),
    (lambda k: D.Dense(2, [None, lambda x: x * 2][k]), "activation", "lambda"),
    (lambda k: D.Dropout(0.25 + k / 2), "rate", "0.75"),
    (lambda k: D.BatchNormalization(momentum=0.5 + k / 4), "momentum", "0.75"),
    (lambda k: D.Dense(2, dtype=["float32", "bfloat16"][k]), "dtype", "bfloat"),
    (
        lambda k: D.Dense(2, kernel_regularizer=["l1", "l2"][k]),
        "kernel_regularizer",
        "L2",
    ),
    (lambda k: [D.Dense(2), D.ReLU()][k], "class", "ReLU"),
    (lambda k: D.Lambda([abs, lambda x: x][k]), "function", "lambda"),
)


@pytest.mark.filterwarnings("ignore:The object being serialized")
@pytest.mark.parametrize("make", ALIKE)
def test_settings_of_layers_that_change_no_result_may_differ(make):
    found = _unlike(lambda: make(0), lambda: make(1))
    assert found == {}


@pytest.mark.filterwarnings("ignore:The object being serialized")
@pytest.mark.parametrize("make, setting, value", UNLIKE)
def test_a_layer_and_its_setting_are_named(make, setting, value):
    (found,) = _unlike(lambda: make(0), lambda: make(1)).items()
    assert found[0].startswith(f"{setting} of layer '")
    assert value in found[1][1]


def test_a_layer_that_a_rank_lacks_is_named():
    one = keras.Sequential([keras.Input((2,)), D.Dense(2)])
    more = keras.Sequential([keras.Input((2,)), D.Dense(2), D.ReLU(name="r")])
    ranks = [layers(model, Words()) for model in (one, more)]
    assert differing_layer(ranks) == {
        "class of layer 'r'": ["not given", "ReLU"]
    }


def test_what_cannot_be_read_is_kept_to_be_said():
    words = Words()
    layers(keras.Sequential([keras.Input((2,)), Unread(lambda: 1)]), words)
    assert words.unread == {"Unread"}


def _branches(*, of=0, index=0, factor=2.0, before=0):
    """A functional model, with other names if layers were made before."""
    for _ in range(before):
        D.Dense(1)
    inputs = keras.Input((2, 3))
    shared = D.Dense(3)
    hidden = shared(inputs)
    out = shared(hidden) + factor * [inputs, hidden][of][:, index, None]
    return keras.Model(inputs, out)


def _differing(one, other):
    return differing_layer([layers(one, Words()), layers(other, Words())])


def test_names_of_connected_layers_may_differ():
    assert _differing(_branches(), _branches(before=3)) == {}


@pytest.mark.parametrize("other", [{"of": 1}, {"index": 1}, {"factor": 3.0}])
def test_models_of_the_same_layers_are_told_apart(other):
    (name,) = _differing(_branches(), _branches(**other))
    assert name.startswith("connections of layer 'functional")


def test_a_model_that_is_built_has_the_same_settings():
    made = keras.Sequential([D.Dense(2), keras.Sequential([D.Dense(3)])])
    before = layers(made, Words())
    made.build((None, 4))
    assert differing_layer([before, layers(made, Words())]) == {}


def test_all_optimizers_are_described():
    def described(momentum, initial_scale=2.0):
        made = linear()
        inner = keras.optimizers.SGD(0.1, momentum)
        made.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale))
        made.of_others = [keras.optimizers.Adam(0.1 + momentum)]
        return compiled(made, Words())

    one = described(0.25)
    for other, found in (
        (
            described(0.5),
            {"momentum of the optimizer", "learning_rate of optimizer 3"},
        ),
        (described(0.25, 4.0), {"initial_scale of optimizer 2"}),
    ):
        assert {name for name in one if one[name] != other[name]} == found
