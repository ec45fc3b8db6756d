"""A ``train_step`` may be any callable: towers split its batch all the same."""

import functools

import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_same, outcome
from tests.kit.long import some_of
from tests.kit.training import X, Y, classifier, fit


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


@pytest.mark.parametrize("form", some_of(FORMS, 3))
def test_any_callable_is_exact(form):
    def make():
        model = classifier()
        model.train_step = FORMS[form](model)
        return model

    def trained(model):
        return fit(model, x=X[:20], y=Y[:20])

    wanted = outcome(classifier, trained, in_graph=False)
    assert_same(outcome(make, trained, kt.TowerStrategy(3)), wanted)
