"""A ``train_step`` may be any callable: towers split its batch all the same."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import same_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, classifier


class Decorated(keras.Sequential):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class Elsewhere:
    """An object of its own, whose method a model is given as its step."""

    def __init__(self, model):
        self.model, self.original = model, type(model).train_step

    def step(self, data):
        return self.original(self.model, data)


def decorated():
    model = classifier()
    mine = Decorated(model.layers)
    mine.compile(model.optimizer, model.loss, metrics=["accuracy"])
    return mine


def given(make):
    """A model whose ``train_step`` is what ``make`` gives for it."""
    model = classifier()
    model.train_step = make(model)
    return model


FORMS = {
    "decorated": decorated,
    "function": lambda: given(
        lambda m: lambda data: type(m).train_step(m, data)
    ),
    "partial": lambda: given(
        lambda m: functools.partial(type(m).train_step, m)
    ),
    "method of another object": lambda: given(lambda m: Elsewhere(m).step),
    "tf.function": lambda: given(
        lambda m: tf.function(lambda data: type(m).train_step(m, data))
    ),
}


STRATEGIES = {
    "towers": lambda: kt.TowerStrategy(3),
    "servers": lambda: kt.ParameterServerTowerStrategy(2),
}


@pytest.mark.parametrize(
    "form, strategy",
    [*((form, "towers") for form in FORMS), ("decorated", "servers")],
)
def test_any_callable_is_exact(form, strategy):
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    reference, model = FORMS[form](), FORMS[form]()
    wanted = reference.fit(X, Y, **options).history
    with STRATEGIES[strategy]():
        found = model.fit(X, Y, **options).history
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    same_model(model, reference)
    assert_ordinary(model)
