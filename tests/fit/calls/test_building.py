"""What only a step builds or adopts is there before the step is judged."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact

X = m.FEATURES[:24]


class Headed(keras.Model):
    """Its ``call`` uses none of its heads, and its step only one."""

    def __init__(self):
        super().__init__()
        self.policy = keras.layers.Dense(3)
        self.value = keras.layers.Dense(1)
        self.drawn = []

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        with tf.GradientTape() as tape:
            values = tf.reduce_mean(tf.square(self.policy(data)))
            loss = tf.sqrt(values)
        self.before_update()
        weights = self.policy.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def before_update(self):
        pass


class Counting(Headed):
    """Writes a variable that is nobody's."""

    def __init__(self):
        super().__init__()
        self.hidden = (lambda counter: lambda: counter)(tf.Variable(0.0))

    def before_update(self):
        self.hidden().assign_add(1.0)


def make(cls):
    keras.utils.set_random_seed(1)
    model = cls()
    model.compile(m.momentum(), jit_compile=False)
    return model


def act(model):
    model.fit(X, batch_size=8, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(w) for w in model.policy.weights]


@pytest.mark.parametrize("cls", [Headed, Counting])
def test_exact_from_the_first_step_on(cls, logged):
    strategy = kt.TowerStrategy(2, exact=True)
    assert_exact(lambda: make(cls), act, strategy, tolerance=2e-6)
    assert not logged("the training step of")
    assert "values of all towers for 1 operation" in strategy.describe()


def test_told_without_it(logged):
    with kt.TowerStrategy(2):
        act(make(Headed))
    ((_, message),) = logged("the training step of")
    assert "takes Sqrt of a sum or mean over the batch" in message
