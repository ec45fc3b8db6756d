"""The user's model, and what all rows start from."""

import sys
import types

import keras
import numpy as np
import pytest
from keras import layers

from keras_towers.bench.field.examples import random_examples
from keras_towers.bench.field.models import Stored
from keras_towers.errors import TowerError


@pytest.fixture
def users(monkeypatch):
    """Make a function of a module ``mine``."""

    def make(function):
        module = types.SimpleNamespace(build=function)
        monkeypatch.setitem(sys.modules, "mine", module)

    return make


def perceptron(loss="mse", inputs=4, outputs=3):
    model = keras.Sequential([keras.Input((inputs,)), layers.Dense(outputs)])
    model.compile("sgd", loss)
    return model


def test_every_process_has_the_weights_and_data_of_the_first(users, tmp_path):
    x = {"a": np.random.rand(5, 4), "b": [np.arange(5)]}
    built = []

    def build():
        inputs = {"a": keras.Input((4,), name="a"), "b": [keras.Input(())]}
        hidden = layers.Dense(3)(inputs["a"])
        outputs = layers.BatchNormalization()(hidden) * inputs["b"][0][:, None]
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse")
        built.append(model)
        return model, x, np.random.rand(5, 3)

    users(build)
    stored = Stored("mine:build", tmp_path)
    told = stored.store(12)
    assert told == {"parameters": 27, "note": ""}
    wrapped = []
    model = stored.build(lambda optimizer: wrapped.append(optimizer) or "mine")
    assert model is built[1]
    for mine, first in zip(model.weights, built[0].weights, strict=True):
        assert np.array_equal(mine, first)
    assert isinstance(wrapped[0], keras.optimizers.Adam)
    assert model.optimizer == "mine"
    # Five examples are repeated until there are enough.
    (got, y), again = stored.data(7), stored.data(12)
    assert np.array_equal(got["a"], np.tile(x["a"], (2, 1))[:7])
    assert got["b"][0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert np.array_equal(again[1][:7], y)


def test_model_without_data_gets_random_examples(users, tmp_path):
    users(perceptron)
    stored = Stored("mine:build", tmp_path)
    assert "random examples" in stored.store(6)["note"]
    x, y = stored.data(6)
    assert (x.shape, y.shape) == ((6, 4), (6, 3))


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("mse", lambda y: y.shape == (50, 3) and 0 < y.mean() < 1),
        (
            keras.losses.SparseCategoricalCrossentropy(),
            lambda y: y.shape == (50,) and set(y) == {0, 1, 2},
        ),
        (
            "categorical_crossentropy",
            lambda y: y.shape == (50, 3) and (y.sum(axis=1) == 1).all(),
        ),
        (
            keras.losses.binary_crossentropy,
            lambda y: y.shape == (50, 3) and set(y.ravel()) == {0, 1},
        ),
    ],
)
def test_labels_are_as_the_loss_expects_them(loss, labels):
    model = perceptron(loss)
    x, y = random_examples(model, "it", 50)
    assert labels(y)
    assert np.isfinite(model.evaluate(x, y, verbose=0))


def test_ids_are_known_to_every_embedding():
    words, tags = (
        keras.Input((9,), dtype="int32"),
        keras.Input((), dtype="int64"),
    )
    body = keras.Sequential([keras.Input((9,)), layers.Embedding(7, 2)])
    hidden = layers.Flatten()(body(words))
    outputs = layers.Concatenate()([hidden, layers.Embedding(30, 2)(tags)])
    model = keras.Model([words, tags], outputs)
    model.compile("sgd", "mse")
    (of_words, of_tags), _ = random_examples(model, "it", 100)
    assert of_words.shape == (100, 9)
    assert of_tags.shape == (100,)
    assert set(of_words.ravel()) == set(range(7))


def two_outputs():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [inputs, inputs])
    model.compile("sgd", "mse")
    return model


def any_length():
    inputs = keras.Input((None, 2))
    model = keras.Model(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model


def not_built():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def in_chunks():
    model = perceptron()
    model.compile("sgd", "mse", steps_per_execution=8)
    return model


def broken():
    raise RuntimeError("no data here")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (broken, "mine:build failed: RuntimeError: no data here"),
        (lambda: 3, "has to return a compiled Keras model, or .* returned 3"),
        (lambda: (perceptron(), [1.0]), r"or \(model, x, y\)"),
        (lambda: keras.Sequential(), "not compiled: call model.compile"),
        (two_outputs, r"it has 2 outputs; return \(model, x, y\)"),
        (any_length, r"a shape of it is \(None, None, 2\)"),
        (not_built, "the shape of its inputs is not known"),
        (
            lambda: (perceptron(), np.ones((3, 4)), [object()]),
            "has to return arrays of examples",
        ),
        (
            lambda: (perceptron(), np.ones((0, 4)), np.ones((0, 3))),
            "has to return arrays of examples",
        ),
        (
            lambda: (perceptron(), [[1.0], [1.0, 2.0]], np.ones((2, 3))),
            "has to return arrays of examples",
        ),
        (
            lambda: (perceptron(), np.ones((5, 4)), np.ones((4, 3))),
            "returned 4 and 5 examples; x and y need as many",
        ),
        (in_chunks, "steps_per_execution=8, but each step is timed"),
    ],
)
def test_what_the_function_returns_is_checked(users, tmp_path, function, said):
    users(function)
    with pytest.raises(TowerError, match=said):
        Stored("mine:build", tmp_path).store(4)


def test_function_that_is_not_there_is_named(tmp_path, users):
    users(perceptron)
    for target in ("mine:make", "no_such_module:build"):
        with pytest.raises(TowerError, match=f"{target} cannot be imported"):
            Stored(target, tmp_path).store(4)


def test_data_of_another_hand_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "data.npz", np.array([print], dtype=object))
    (tmp_path / "data.json").write_text("[0, 0]")
    with pytest.raises(ValueError, match="allow_pickle"):
        Stored("small", tmp_path).data(1)
