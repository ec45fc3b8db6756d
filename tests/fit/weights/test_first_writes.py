"""Steps that write weights which towers had in common until then."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit import training
from tests.kit.compare import same_model


class Averaged(keras.Sequential):
    """Averages its weights by hand, and takes the averages now and then."""

    def build(self, input_shape=None):
        super().build(input_shape)
        self.averages = [
            self.add_weight(weight.shape, initializer="zeros", trainable=False)
            for weight in self.trainable_variables
        ]
        self.steps = self.add_weight(
            (), initializer="zeros", dtype="int32", trainable=False
        )

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.assign_add(1)
        pairs = list(zip(self.averages, self.trainable_variables, strict=True))
        for average, weight in pairs:
            average.assign(0.9 * average + 0.1 * weight)

        def take():
            for average, weight in pairs:
                weight.assign(average)
            return 0

        tf.cond(self.steps % 2 == 0, take, lambda: 0)
        return logs


@pytest.mark.parametrize(
    "strategy", [kt.TowerStrategy, kt.ParameterServerTowerStrategy]
)
def test_in_a_conditional_after_the_update(strategy):
    def make():
        keras.utils.set_random_seed(1)
        model = Averaged([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(m.momentum(), m.cross_entropy())
        return model

    alone, model = make(), make()
    training.fit(alone)
    with strategy(towers=2):
        training.fit(model)
    same_model(model, alone)
