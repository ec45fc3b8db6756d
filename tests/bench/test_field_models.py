"""The user's model, and what all rows of the field start from."""

import sys
import types

import keras
import numpy as np
import pytest
from keras import layers, losses

from keras_towers.bench.field.examples import random_examples
from keras_towers.bench.field.models import Stored
from keras_towers.errors import TowerError


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """What a function of a module ``mine`` returns, to be stored."""

    def make(function, target="mine:build"):
        module = types.SimpleNamespace(build=function)
        monkeypatch.setitem(sys.modules, "mine", module)
        return Stored(target, tmp_path)

    return make


def compiled(*args, loss="mse", **options):
    model = keras.Model(*args)
    model.compile("sgd", loss, **options)
    return model


def perceptron(**options):
    inputs = keras.Input((4,))
    return compiled(inputs, layers.Dense(3)(inputs), **options)


def test_every_process_has_the_weights_and_data_of_the_first(stored):
    x = {"a": np.random.rand(5, 4), "b": [np.arange(5)]}
    built = []

    def build():
        inputs = {"a": keras.Input((4,), name="a"), "b": [keras.Input(())]}
        hidden = layers.Dense(3)(inputs["a"])
        outputs = layers.BatchNormalization()(hidden) * inputs["b"][0][:, None]
        built.append(compiled(inputs, outputs))
        return built[-1], x, np.random.rand(5, 3)

    mine = stored(build)
    assert mine.store(12) == {"parameters": 27, "note": ""}
    wrapped = []
    model = mine.build(lambda optimizer: wrapped.append(optimizer) or "mine")
    assert model is built[1]
    for weight, first in zip(model.weights, built[0].weights, strict=True):
        assert np.array_equal(weight, first)
    assert isinstance(wrapped[0], keras.optimizers.SGD)
    assert model.optimizer == "mine"
    # Five examples are repeated until there are enough.
    (got, y), again = mine.data(7), mine.data(12)
    assert np.array_equal(got["a"], np.tile(x["a"], (2, 1))[:7])
    assert got["b"][0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert np.array_equal(again[1][:7], y)


def has(*values):
    return lambda y: set(y.ravel()) == set(values)


def test_model_without_data_gets_random_examples(stored):
    mine = stored(perceptron)
    assert "random examples" in mine.store(6)["note"]
    x, y = mine.data(6)
    assert (x.shape, y.shape) == ((6, 4), (6, 3))


@pytest.mark.parametrize(
    ("loss", "shape", "fits"),
    [
        ("mse", (50, 3), lambda y: 0 < y.mean() < 1),
        (losses.SparseCategoricalCrossentropy(), (50,), has(0, 1, 2)),
        (
            "categorical_crossentropy",
            (50, 3),
            lambda y: (y.sum(axis=1) == 1).all(),
        ),
        (losses.binary_crossentropy, (50, 3), has(0, 1)),
    ],
)
def test_labels_are_as_the_loss_expects_them(loss, shape, fits):
    model = perceptron(loss=loss, run_eagerly=True)
    x, y = random_examples(model, "it", 50)
    assert y.shape == shape
    assert fits(y)
    assert np.isfinite(model.evaluate(x, y, verbose=0))


def test_ids_are_known_to_every_embedding():
    words = keras.Input((9,), dtype="int32")
    tags = keras.Input((), dtype="int64")
    body = keras.Sequential([keras.Input((9,)), layers.Embedding(7, 2)])
    hidden = layers.Flatten()(body(words))
    outputs = layers.Concatenate()([hidden, layers.Embedding(30, 2)(tags)])
    model = compiled([words, tags], outputs)
    (of_words, of_tags), _ = random_examples(model, "it", 100)
    assert of_words.shape == (100, 9)
    assert of_tags.shape == (100,)
    assert set(of_words.ravel()) == set(range(7))


def two_outputs():
    inputs = keras.Input((2,))
    return compiled(inputs, [inputs, inputs])


def any_length():
    inputs = keras.Input((None, 2))
    return compiled(inputs, layers.Dense(1)(inputs))


def not_built():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def broken():
    raise RuntimeError("no data here")


ARRAYS = "has to return arrays of examples"
ONES = np.ones((5, 4))


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
        (lambda: (perceptron(), ONES, [object()]), ARRAYS),
        (lambda: (perceptron(), ONES[:0], ONES[:0]), ARRAYS),
        (lambda: (perceptron(), [[1.0], [1.0, 2.0]], ONES[:2]), ARRAYS),
        (lambda: (perceptron(), ONES, ONES[:4]), "returned 4 and 5 examples"),
        (lambda: perceptron(steps_per_execution=8), "but each step is timed"),
    ],
)
def test_what_the_function_returns_is_checked(stored, function, said):
    with pytest.raises(TowerError, match=said):
        stored(function).store(4)


@pytest.mark.parametrize("target", ["mine:make", "no_such_module:build"])
def test_function_that_is_not_there_is_named(stored, target):
    with pytest.raises(TowerError, match=f"{target} cannot be imported"):
        stored(perceptron, target).store(4)


def test_data_of_another_hand_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "data.npz", np.array([print], dtype=object))
    (tmp_path / "data.json").write_text("[0, 0]")
    with pytest.raises(ValueError, match="allow_pickle"):
        Stored("small", tmp_path).data(1)
