"""The user's model, and what all rows start from."""

import sys
import types

import keras
import numpy as np
import pytest
from keras import layers, losses

from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.bench.models import MODELS, Stored, Workload
from tests.kit.compare import assert_all_close
from tests.kit.sampling import long_unless


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """What a function of a module ``mine`` returns, to be stored."""

    def make(function):
        module = types.SimpleNamespace(build=function)
        monkeypatch.setitem(sys.modules, "mine", module)
        return Stored("mine:build", tmp_path)

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
    assert mine.store(12) == "mine:build, 27 parameters"
    model = mine.build()
    assert model is built[1]
    assert_all_close(model.weights, built[0].weights, 0)
    # Five examples are repeated until there are enough.
    (got, y), again = mine.data(7), mine.data(12)
    assert np.array_equal(got["a"], np.tile(x["a"], (2, 1))[:7])
    assert got["b"][0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert np.array_equal(again[1][:7], y)


def has(*values):
    return lambda y: set(y.ravel()) == set(values)


@pytest.mark.parametrize(
    ("loss", "shape", "fits"),
    [
        ("mse", (50, 3), lambda y: 0 < y.mean() < 1),
        (losses.SparseCategoricalCrossentropy(), (50,), has(0, 1, 2)),
        ("sparse_categorical_crossentropy", (50,), has(0, 1, 2)),
        (losses.sparse_categorical_crossentropy, (50,), has(0, 1, 2)),
    ],
)
def test_random_labels_are_as_the_loss_expects_them(stored, loss, shape, fits):
    mine = stored(lambda: perceptron(loss=loss))
    assert "random examples" in mine.store(50)
    x, y = mine.data(50)
    assert (x.shape, y.shape) == ((50, 4), shape)
    assert fits(y)


ONES = np.ones((5, 4))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: 1 / 0, "mine:build failed: ZeroDivisionError"),
        (lambda: (perceptron(), ONES), "alone or as .model, x, y., but"),
        (lambda: (perceptron(), ONES, [object()]), "arrays of examples"),
        (lambda: (perceptron(), ONES, ONES[:4]), "returned 4 and 5 examples"),
        (lambda: perceptron(steps_per_execution=8), "but each step is timed"),
    ],
)
def test_what_the_function_returns_is_checked(stored, function, said):
    with pytest.raises(TowerError, match=said):
        stored(function).store(4)


def test_data_of_another_hand_is_not_unpickled(tmp_path):
    objects = np.array([print], dtype=object)
    np.savez(tmp_path / "data.npz", np.array("[0, 0]"), objects)
    with pytest.raises(ValueError, match="allow_pickle"):
        Stored("small", tmp_path).data(1)


@pytest.mark.parametrize(
    "name", long_unless(lambda name: name == "small", MODELS)
)
def test_own_models_train(name, tmp_path):
    model = Stored(name, tmp_path)
    assert name in model.store(8)
    x, y = model.data(8)
    assert model.build().train_on_batch(x, y, return_dict=True)["loss"] < 10


def test_data_is_loaded_once_and_shared_by_the_ranks(tmp_path):
    made = []

    def data(examples):
        made.append(examples)
        return np.arange(examples), -np.arange(examples)

    model = types.SimpleNamespace(data=data)
    for rank, wanted in enumerate(([0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11])):
        work = Workload(model, tmp_path, rank, 2, [], batch=4, steps=3)
        assert work.data[0] is work.data[0]
        x, y = work.part()
        assert x.tolist() == (-y).tolist() == wanted
    assert made == [12, 12]
