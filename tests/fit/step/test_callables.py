"""A ``train_step`` may be any callable: towers split its batch all the same."""

import functools

import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import same_model
from tests.kit.long import some_of
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, classifier


class Elsewhere:
    """An object of its own, whose method a model is given as its step."""

    def __init__(self, model):
        self.model, self.original = model, type(model).train_step

    def step(self, data):
        return self.original(self.model, data)


FORMS = {
    "partial": lambda m: functools.partial(type(m).train_step, m),
    "method of another object": lambda m: Elsewhere(m).step,
    "tf.function": lambda m: tf.function(m.train_step),
}


def trained(model):
    model.fit(X[:20], Y[:20], batch_size=8, shuffle=False, verbose=0)
    return model


@functools.cache
def on_one_device():
    return trained(classifier())


@pytest.mark.parametrize("form", some_of(FORMS))
def test_any_callable_is_exact(form):
    model = classifier()
    model.train_step = FORMS[form](model)
    with kt.TowerStrategy(3):
        trained(model)
    same_model(model, on_one_device())
    assert_ordinary(model)
