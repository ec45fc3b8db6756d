"""Towers that do not do the same are refused, naming what differs."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.strategies.test_bad_input import Before, X, Y, assert_says


def test_towers_that_have_gradients_for_other_variables():
    class Uneven(keras.Sequential):
        def train_step(self, data):
            x, y = data
            context = tf.distribute.get_replica_context()
            index = tf.get_static_value(context.replica_id_in_sync_group)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x))
            variables = self.trainable_variables
            grads = tape.gradient(loss, variables)
            if index == 1:
                grads[0] = None
            self.optimizer.apply(grads, variables)
            return {"loss": loss}

    model = Uneven([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(m.momentum())
    was = Before(model)
    with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert_says(error, "tower 1", "tower 0", model.weights[0].path)
    assert model.weights[1].path not in str(error.value)
    was.assert_still()


def test_towers_that_train_other_variables():
    class Uneven(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            context = tf.distribute.get_replica_context()
            index = tf.get_static_value(context.replica_id_in_sync_group)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x))
            variables = self.trainable_variables[: 2 - index]
            grads = tape.gradient(loss, variables)
            self.optimizer.apply(grads, variables)
            return {"loss": loss}

    model = Uneven([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(m.momentum())
    was = Before(model)
    with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert_says(error, "tower 1", "different variables", model.weights[1].path)
    was.assert_still()
