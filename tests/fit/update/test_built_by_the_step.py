"""Optimizers that a step builds, and whose gradients it applies in parts."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit import training
from tests.kit.compare import assert_exact


class InParts(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        grads = tape.gradient(loss, weights)
        self.optimizer.build(weights)
        self.optimizer.apply(grads[:1], weights[:1])
        self.optimizer.apply(grads[1:], weights[1:])
        return {"loss": loss}


@pytest.mark.parametrize(
    "options, eagerly",
    [({}, False), ({"updates": "sharded"}, False), ({}, True)],
)
def test_exact(options, eagerly):
    def make():
        keras.utils.set_random_seed(1)
        model = InParts([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(m.momentum(), m.cross_entropy(), run_eagerly=eagerly)
        return model

    assert_exact(make, training.fit, kt.TowerStrategy(2, **options))
