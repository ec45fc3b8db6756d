"""Layers and variables that only a step builds or creates."""

import contextlib

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact

X = m.FEATURES[:24]


class Headed(keras.Model):
    """Its ``call`` uses none of its heads, and its step only one.

    The step also writes a variable that is nobody's.
    """

    def __init__(self):
        super().__init__()
        self.policy = keras.layers.Dense(3)
        self.value = keras.layers.Dense(1)
        self.hidden = (lambda counter: lambda: counter)(tf.Variable(0.0))

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.sqrt(tf.reduce_mean(tf.square(self.policy(data))))
        self.hidden().assign_add(1.0)
        weights = self.policy.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_exact_from_the_first_step_on():
    def make():
        keras.utils.set_random_seed(1)
        model = Headed()
        model.compile(m.momentum(), jit_compile=False)
        return model

    def act(model):
        model.fit(X, batch_size=8, shuffle=False, verbose=0)
        return model.policy.get_weights(), model.hidden().numpy()

    assert_exact(make, act, kt.TowerStrategy(2))


def misspelled(**options):
    heads = "a", "b"
    inputs = keras.Input((6,))
    outputs = {name: keras.layers.Dense(3, name=name)(inputs) for name in heads}
    model = keras.Model(inputs, outputs)
    losses = dict.fromkeys(heads, "mse")
    model.compile("sgd", **{"loss": losses, **options})
    return model


class Lazy(keras.Model):
    """Builds a layer, and then fails."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.compile("sgd", "mse")

    def call(self, inputs):
        raise KeyError(f"no {self.dense(inputs).shape[-1]}")


@pytest.mark.parametrize(
    ("make", "said", "strategy"),
    [
        (
            lambda: misspelled(metrics={"typo": ["mae"]}),
            "Invalid `metrics`",
            kt.TowerStrategy,
        ),
        (
            lambda: misspelled(loss={"a": "mse", "typo": "mse"}),
            "typo",
            kt.TowerStrategy,
        ),
        (Lazy, "no 3", kt.AsyncTowerStrategy),
    ],
    ids=["metrics", "loss", "layer"],
)
def test_the_error_of_a_model_that_cannot_be_built(make, said, strategy):
    y = dict.fromkeys(("a", "b"), X[:, :3])
    errors = []
    for block in (contextlib.nullcontext(), strategy(2)):
        with pytest.raises(Exception, match=said) as error, block:
            make().fit(X, y, verbose=0)
        errors.append(error.value)
    alone, towers = errors
    assert type(towers) is type(alone)
    assert str(towers).splitlines()[-1] == str(alone).splitlines()[-1]
