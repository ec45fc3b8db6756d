"""Whatever calls Keras's own methods, the model trains on the towers."""

import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.strategies import keras_distribution
from tests.kit.compare import assert_exact, assert_same, use_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, linear

NAMES = ("fit", "evaluate", "predict")


def wrap_class(monkeypatch):
    """Wrap methods of all models, as libraries that log runs do."""
    for name in NAMES:
        original = getattr(keras.Model, name)

        @functools.wraps(original)
        def logged(model, *args, original=original, **kwargs):
            return original(model, *args, **kwargs)

        monkeypatch.setattr(keras.Model, name, logged, raising=False)


def trained(model):
    """Train on batches that do not split evenly; evaluate and predict."""
    evaluated = {"validation_data": (X[:11], Y[:11]), "verbose": 0}
    return [
        model.fit(X, Y, batch_size=9, shuffle=False, **evaluated).history,
        model.evaluate(X[:21], Y[:21], verbose=0),
        model.predict(X[:21], verbose=0),
    ]


@functools.cache
def on_one_device():
    return use_model(functools.partial(linear, run_eagerly=True), trained)


@pytest.mark.parametrize(
    "when", sample_of(["before", "inside", "between"], part=3)
)
def test_a_library_that_wraps_all_models(when, monkeypatch):
    wrapped = functools.partial(wrap_class, monkeypatch)

    def act(model):
        if when == "inside":
            wrapped()
        found = trained(model)
        if when == "inside":
            monkeypatch.undo()
        return found

    if when == "between":
        with kt.TowerStrategy(2):
            linear().predict(X, verbose=0)
    wanted = on_one_device()
    if when != "inside":
        wrapped()
    assert_same(use_model(linear, act, kt.TowerStrategy(2)), wanted)


def test_methods_that_were_read_before_the_block():
    def make():
        model = linear()
        model.taken = [getattr(model, n) for n in (*NAMES, "train_on_batch")]
        return model

    class Taken:
        pass

    def act(model):
        taken = Taken()
        taken.fit, taken.evaluate, taken.predict, train_on_batch = model.taken
        return trained(taken), train_on_batch(X[:7], Y[:7])

    assert_exact(make, act, kt.TowerStrategy(2))


@pytest.fixture
def as_before_the_import():
    """Keras as it is before keras_towers is imported."""
    keras_distribution.disconnect()
    yield
    keras_distribution.connect()


def test_a_batch_method_that_was_read_before_the_block_is_refused(
    as_before_the_import,
):
    model = linear()
    before = model.get_weights()
    for name in ("train", "test", "predict"):
        taken = getattr(model, f"{name}_on_batch")
        data = (X[:8],) if name == "predict" else (X[:8], Y[:8])
        with (
            kt.TowerStrategy(2),
            pytest.raises(kt.TowerError, match="wrap it inside the block"),
        ):
            taken(*data)
        np.testing.assert_equal(model.get_weights(), before)
        assert_ordinary(model)
