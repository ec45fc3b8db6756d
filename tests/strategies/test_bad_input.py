"""Bad input: one error that says what to do, and a model that is as before."""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat
from tests.exactness import models as m
from tests.kit.compare import (
    assert_exact,
    close,
    outcome,
    same_history,
    weights_of,
)
from tests.kit.long import long_but
from tests.kit.training import compiled

X, Y = m.FEATURES, m.LABELS


class Before:
    """A model, and whether an error left it as it was."""

    def __init__(self, model):
        self.model = model
        self.weights = weights_of(model)
        self.variables = [v._value for v in model.variables]
        self.fit = keras.Model.fit
        self.apply = keras.optimizers.SGD.apply

    def assert_still(self):
        assert not tf.distribute.has_strategy()
        assert keras.Model.fit is self.fit
        assert keras.optimizers.SGD.apply is self.apply
        assert self.model._distribute_strategy is None
        assert "fit" not in vars(self.model)
        now = [v._value for v in self.model.variables[: len(self.variables)]]
        for value, before in zip(now, self.variables, strict=True):
            assert value is before
            assert not isinstance(value, compat.DistributedVariable)
        for name, value in weights_of(self.model).items():
            if name in self.weights:
                np.testing.assert_array_equal(value, self.weights[name], name)

    def assert_trains_on(self):
        """Train on towers, after the error, as a fresh model does alone."""
        wanted = trained_alone()
        with kt.TowerStrategy(2):
            found = train(self.model).history
        same_history(found, wanted.returned)
        # Only weights: Keras counts an iteration that found no data.
        for value, other in zip(
            self.model.weights, wanted.model.weights, strict=True
        ):
            close(value, other)


def train(model):
    return model.fit(X, Y, shuffle=False, verbose=0)


@functools.cache
def trained_alone():
    return outcome(compiled(), train)


@pytest.fixture
def before():
    return Before(compiled()())


def assert_says(error, *parts):
    message = str(error.value)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    "arguments",
    [
        {"towers": 0},
        {"towers": -1},
        {"towers": ["CPU:0", "CPU:0"]},
        {"towers": ["CPU:99"]},
        {"towers": 2, "mode": "fastest"},
        {"towers": 2, "batches": "both"},
        {"towers": 2, "updates": "never"},
        {"towers": 2, "average": "no"},
        {"towers": 2, "average": None},
        {"towers": 2, "average": 1},
    ],
)
def test_strategy_that_cannot_be(before, arguments):
    with pytest.raises(kt.TowerError), kt.TowerStrategy(**arguments):
        before.model.fit(X, Y, verbose=0)
    before.assert_still()
    before.assert_trains_on()


@pytest.mark.parametrize("average", [True, False])
def test_average_of_numpy(average):
    strategy = kt.TowerStrategy(np.int64(2), average=np.bool_(average))
    assert strategy.average is average


def test_model_of_a_mirrored_strategy():
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with mirrored.scope():
        model = compiled()()
    values = [v._value for v in model.variables]
    weights = weights_of(model)
    with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert_says(error, model.name, "MirroredStrategy", "another strategy")
    assert model._distribute_strategy is mirrored
    assert [v._value for v in model.variables] == values
    for name, value in weights_of(model).items():
        np.testing.assert_array_equal(value, weights[name])
    assert not tf.distribute.has_strategy()


def test_layer_of_a_mirrored_strategy():
    # The model is nobody's, but a layer's variables are.
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 6))
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile("sgd", m.cross_entropy())
    value = layer.kernel._value
    with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert_says(error, layer.kernel.path, "another strategy")
    assert layer.kernel._value is value
    assert model._distribute_strategy is None


def test_model_that_another_tower_strategy_has_adopted(before):
    first, second = kt.TowerStrategy(2), kt.TowerStrategy(3)
    with first:
        first.adopt(before.model)
        with pytest.raises(kt.TowerError) as error:
            second.adopt(before.model)
        assert_says(error, before.model.name, "TowerStrategy", "leave")
        assert before.model._distribute_strategy is first
    before.assert_still()
    before.assert_trains_on()


def test_nested_strategies(before):
    with kt.TowerStrategy(2):
        with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(3):
            before.model.fit(X, Y, verbose=0)
        assert_says(error, "TowerStrategy", "leave")
    before.assert_still()
    before.assert_trains_on()


def test_inside_a_mirrored_strategy(before):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(2):
            before.model.fit(X, Y, verbose=0)
        assert_says(error, "MirroredStrategy", "leave")
    before.assert_still()
    before.assert_trains_on()


def test_entered_twice(before):
    strategy = kt.TowerStrategy(2)
    with strategy:
        with pytest.raises(kt.TowerError) as error, strategy:
            before.model.fit(X, Y, verbose=0)
        assert_says(error, "entered already", "once at a time")
        # The outer scope is still entered.
        assert tf.distribute.get_strategy() is strategy
    before.assert_still()
    before.assert_trains_on()


EMPTY = {
    "numpy": lambda: (X[:0], Y[:0]),
    "tf.data": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y)).take(0).batch(4),
    ),
    "unknown length": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y))
        .filter(lambda *_: False)
        .batch(4),
    ),
}


def error_of(data, strategy=None):
    """The error that a fresh model's ``fit`` raises, if any."""
    model = compiled()()
    try:
        with strategy or contextlib.nullcontext():
            model.fit(*data, verbose=0)
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(
    "kind, each, method",
    # Each way of dividing batches with one of the methods.
    long_but(
        lambda case: case[1] == (case[2] == "fit"),
        itertools.product(EMPTY, (False, True), ("fit", "evaluate")),
    ),
)
def test_empty_dataset(before, kind, each, method):
    strategy = kt.TowerStrategy(2, batches="each" if each else "split")
    with pytest.raises(ValueError) as error, strategy:
        getattr(before.model, method)(*EMPTY[kind](), verbose=0)
    message = str(error.value)
    assert any(word in message for word in ("0 examples", "0 batches", "empty"))
    before.assert_still()
    before.assert_trains_on()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("each", [False, True])
def test_dataset_smaller_than_the_towers(before, count, each):
    what = {1: ("example", "batch"), 3: ("examples", "batches")}[count][each]
    strategy = kt.TowerStrategy(4, batches="each" if each else "split")
    with pytest.raises(kt.TowerError) as error, strategy:
        before.model.fit(X[:count], Y[:count], batch_size=1, verbose=0)
    assert_says(error, f"{count} {what}", "4 towers", f"at most {count} tower")
    before.assert_still()
    before.assert_trains_on()


@pytest.mark.parametrize("count", [1, 3])
def test_few_examples_of_unknown_number_train_exactly(count):
    # Nobody can tell before that there are fewer than towers.
    def act(model):
        dataset = tf.data.Dataset.from_tensor_slices((X[:count], Y[:count]))
        dataset = dataset.batch(8).filter(lambda *_: True)
        trained = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history
        # To evaluate and predict, any number of examples is enough.
        evaluated = model.evaluate(X[:count], Y[:count], verbose=0)
        return trained, evaluated, model.predict(X[:count], verbose=0)

    assert_exact(compiled(), act, kt.TowerStrategy(4))


def test_model_that_is_not_compiled():
    model = m.mlp()
    was = Before(model)
    with pytest.raises(ValueError) as alone:
        model.fit(X, Y, verbose=0)
    with pytest.raises(ValueError) as error, kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert str(error.value) == str(alone.value)
    was.assert_still()
    model.compile(m.momentum(), m.cross_entropy(), metrics=["accuracy"])
    was.assert_trains_on()


@pytest.mark.parametrize(
    "x,y",
    [
        (X[:, :4], Y),
        (X, Y[:-1]),
        (X, np.zeros((len(X), 5, 2), "float32")),
    ],
)
def test_wrong_shapes_give_the_error_of_keras(before, x, y):
    alone = error_of((x, y))
    found = error_of((x, y), kt.TowerStrategy(2))
    assert type(found) is type(alone)
    assert not isinstance(found, kt.TowerError)
    if y.ndim == 1:
        # Else Keras, which builds before it trains, complains of the metric.
        assert str(found)[:40] == str(alone)[:40]
    with pytest.raises(type(alone)), kt.TowerStrategy(2):
        before.model.fit(x, y, verbose=0)
    before.assert_still()
    before.assert_trains_on()


def test_an_error_inside_a_train_step(before):
    class Broken(keras.Sequential):
        def train_step(self, data):
            raise KeyError("my own mistake")

    model = Broken([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(m.momentum(), m.cross_entropy())
    was = Before(model)
    with pytest.raises(KeyError, match="my own mistake"), kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    was.assert_still()


def test_a_private_name_is_gone_when_a_scope_is_entered(before, monkeypatch):
    monkeypatch.delattr(compat.TensorFlowTrainer, "distribute_strategy")
    strategy = kt.TowerStrategy(2)
    with pytest.raises((AttributeError, kt.CompatibilityError)), strategy:
        pass
    # What had been patched before the missing name is as it was.
    before.assert_still()
    monkeypatch.undo()
    before.assert_trains_on()
