"""``kt.verify``: what it measures, and that it leaves no trace."""

import contextlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_all_close
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.alternate

X = m.FEATURES[:24]
Y = (X[:, :3] ** 2).astype("float32")
ROUNDING = 1e-5


def compiled(model, **options):
    options = {"optimizer": keras.optimizers.Adam(0.01), **options}
    model.compile(loss="mse", jit_compile=False, **options)
    return model


def lazy(*middle, **options):
    """A model that its first batch builds."""
    body = [layers.Dense(8, activation="tanh"), *middle, layers.Dense(3)]
    return compiled(keras.Sequential(body), **options)


def batches():
    for start in range(0, 24, 8):
        yield X[start : start + 8], Y[start : start + 8]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


DATA = {
    "arrays": lambda: (X, Y, m.WEIGHTS[:24]),
    "generator": lambda: (batches(),),
    "threads": lambda: (Batches(workers=2),),
    "shuffled": lambda: (
        tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24).batch(7),
    ),
}


@pytest.mark.parametrize("name", sample_of(DATA))
def test_towers_differ_from_one_device_by_rounding_only(name):
    strategy = kt.TowerStrategy(2)
    model = lazy(layers.Dropout(0.3), metrics=["mae"])
    found = kt.verify(model, *DATA[name](), batch_size=8, strategy=strategy)
    assert found.difference < ROUNDING, str(found)
    assert found.rounding >= np.finfo("float32").eps
    assert found.steps == 3
    assert found.description == strategy.describe()
    assert found.description in str(found)
    assert f"{found.difference:.1e}, in {found.where}" in str(found)


def test_what_differs_is_named():
    strategy = kt.TowerStrategy(2, batch_norm="tower")
    found = kt.verify(
        lazy(layers.BatchNormalization()), X, Y, strategy=strategy, steps=1
    )
    assert found.difference > 0.01 > 100 * found.rounding, str(found)
    assert "dense" in found.where or "batch_norm" in found.where


def test_what_rounding_decides_is_not_compared():
    """The gradient of a bias before BatchNormalization is all rounding."""
    strategy = kt.TowerStrategy(2, batch_norm="global")
    model = lazy(layers.BatchNormalization())
    found = kt.verify(model, X, Y, batch_size=8, strategy=strategy)
    assert found.difference < max(ROUNDING, 100 * found.rounding), str(found)


class OwnStep(keras.Model):
    """A step of its own, which may fail."""

    def __init__(self, error=None):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(8), layers.Dense(3)])
        self.plain = tf.Variable(1.0)
        self.error = error

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        self.plain.assign(2.0)
        if self.error:
            raise self.error
        return super().train_step(data)


def trained():
    model = lazy(
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        optimizer=keras.optimizers.Adam(0.01, use_ema=True),
        metrics=["mae"],
    )
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


MODELS = {
    "trained": (trained, None),
    "new": (lambda: lazy(metrics=["mae"]), None),
    "own step": (lambda: compiled(OwnStep()), None),
    "error": (lambda: compiled(OwnStep(OSError("gone"))), OSError),
    "ctrl-c": (
        lambda: compiled(OwnStep(KeyboardInterrupt())),
        KeyboardInterrupt,
    ),
}


def drawn():
    return random.random(), np.random.rand(), keras.random.uniform(()).numpy()


@pytest.mark.parametrize("name", sample_of(MODELS, part=5))
def test_values_are_as_before(name):
    make, error = MODELS[name]
    model = make()
    variables = state_lib.collect(model).everything()
    values = [v.numpy() for v in variables]
    keras.utils.set_random_seed(3)
    wanted = drawn()
    keras.utils.set_random_seed(3)
    with pytest.raises(error) if error else contextlib.nullcontext():
        kt.verify(model, X, Y, batch_size=8, strategy=kt.TowerStrategy(2))
    assert drawn() == wanted
    assert_all_close(variables, values, 0)
    if isinstance(model, OwnStep):
        assert model.plain.numpy() == 1.0


def test_a_new_model_trains_as_if_nothing_had_happened():
    """Whether it is verified, explained, or neither."""
    weights = []
    for ask in (kt.verify, kt.explain, None):
        keras.utils.set_random_seed(1)
        model = lazy(layers.BatchNormalization())
        if ask:
            ask(model, X, Y, strategy=kt.TowerStrategy(2))
        with kt.TowerStrategy(2):
            model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    assert_all_close(weights[0], weights[2])
    assert_all_close(weights[1], weights[2])


@pytest.mark.parametrize(
    ("make", "data", "steps", "message"),
    [
        (m.mlp, (X, Y), 1, "compiled"),
        (lambda: len, (X, Y), 1, r"keras\.Model"),
        (lazy, (X[:0], Y[:0]), 1, "empty"),
        (lazy, (), 1, "no data"),
        *((lazy, (X, Y), steps, "steps=") for steps in (0, 1.5, "2", True)),
    ],
)
def test_wrong_arguments_are_refused(make, data, steps, message):
    with pytest.raises(kt.TowerError, match=message):
        kt.verify(make(), *data, steps=steps)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: "tower", "strategy='tower'"),
        (lambda: kt.TowerStrategy, "such as TowerStrategy"),
        (kt.NoOpStrategy, "does not compute .*: give a strategy that trains"),
    ],
)
def test_other_strategies_are_refused(strategy, message):
    with pytest.raises(kt.TowerError, match=message):
        kt.verify(lazy(), X, Y, steps=1, strategy=strategy())


def test_it_is_refused_inside_a_strategy():
    with kt.TowerStrategy(2), pytest.raises(kt.TowerError, match="before the"):
        kt.verify(lazy(), X, Y)
