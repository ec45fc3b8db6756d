"""Whatever calls Keras's own methods, the model trains on the towers."""

import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers import distribution
from tests.kit.compare import same_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, adam, classifier

STRATEGIES = [
    lambda: kt.TowerStrategy(3),
    lambda: kt.ParameterServerTowerStrategy(2),
]
NAMES = ("fit", "evaluate", "predict")


def clipped():
    return classifier(optimizer=functools.partial(adam, clipnorm=0.1))


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
    found = [
        model.fit(
            X[:53],
            Y[:53],
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(X[:11], Y[:11]),
        ).history,
        model.evaluate(X[:21], Y[:21], verbose=0, return_dict=True),
        {"outputs": model.predict(X[:21], verbose=0)},
    ]
    return {
        f"{index}-{name}": value
        for index, logs in enumerate(found)
        for name, value in logs.items()
    }


def assert_same(mine, reference):
    assert mine.keys() == reference.keys()
    for name, value in reference.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "when, strategy",
    [
        *((when, STRATEGIES[0]) for when in ("before", "inside", "between")),
        ("before", STRATEGIES[1]),
    ],
    ids=["before", "inside", "between", "before-servers"],
)
def test_a_library_that_wraps_all_models(when, strategy, monkeypatch):
    reference, model = clipped(), clipped()
    expected = trained(reference)
    if when == "before":
        wrap_class(monkeypatch)
    if when == "between":
        with strategy():
            classifier().fit(X, Y, verbose=0)
        wrap_class(monkeypatch)
    with strategy():
        if when == "inside":
            wrap_class(monkeypatch)
        found = trained(model)
        if when == "inside":
            monkeypatch.undo()
    assert_same(found, expected)
    same_model(model, reference)
    assert_ordinary(model)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["towers", "servers"])
def test_a_method_that_was_taken_before(strategy):
    reference, model = classifier(), classifier()
    expected = trained(reference)

    class Taken:
        fit, evaluate, predict = model.fit, model.evaluate, model.predict

    with strategy():
        found = trained(Taken)
    assert_same(found, expected)
    same_model(model, reference)


@pytest.fixture
def as_before_the_import():
    """Keras as it is before keras_towers is imported."""
    distribution.disconnect()
    yield
    distribution.connect()


@pytest.mark.parametrize("name", ["train", "test", "predict"])
def test_a_batch_method_that_was_taken_before_is_refused(
    name, as_before_the_import
):
    model = classifier()
    taken = getattr(model, f"{name}_on_batch")
    before = model.get_weights()
    data = (X[:8],) if name == "predict" else (X[:8], Y[:8])
    with (
        kt.TowerStrategy(2),
        pytest.raises(kt.TowerError, match="wrap it inside the block"),
    ):
        taken(*data)
    for mine, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, value)
    assert_ordinary(model)


def test_a_batch_method_that_was_taken_after_the_import_trains_on_towers():
    reference, model = classifier(), classifier()
    taken = model.train_on_batch
    wanted = reference.train_on_batch(X[:7], Y[:7])
    with kt.TowerStrategy(2):
        found = taken(X[:7], Y[:7])
        assert len(model.trainable_variables[0]._value.values) == 2
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    same_model(model, reference)
