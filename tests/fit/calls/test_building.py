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


class Lazy(keras.Model):
    """Builds a layer, and then fails."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.compile("sgd", "mse")

    def call(self, inputs):
        raise KeyError(f"no {self.dense(inputs).shape[-1]}")


def test_the_error_of_a_model_that_cannot_be_built():
    errors = []
    for block in (contextlib.nullcontext(), kt.AsyncTowerStrategy(2)):
        with pytest.raises(KeyError, match="no 3") as error, block:
            Lazy().fit(X, X[:, :3], verbose=0)
        errors.append(str(error.value).splitlines()[-1])
    alone, towers = errors
    assert towers == alone
