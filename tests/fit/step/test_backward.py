"""A step up to its gradients, with the updates as a second part."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.backward import Backward

pytestmark = pytest.mark.core

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BATCH = (tf.constant(X), tf.constant(Y), None)


class TwoOptimizers(keras.Sequential):
    """A step of one's own that trains two layers by two optimizers."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.other = keras.optimizers.SGD(0.05, momentum=0.9)

    def train_step(self, data):
        x, y, _ = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        for layer, optimizer in zip(
            self.layers, (self.optimizer, self.other), strict=True
        ):
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def built(cls=keras.Sequential, optimizer=None):
    keras.utils.set_random_seed(3)
    model = cls(
        [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01, clipnorm=0.1), "mse")
    model.build((None, 4))
    return model


def scaled():
    inner = keras.optimizers.SGD(0.1)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


@pytest.mark.parametrize("xla", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
    "make",
    [built, lambda: built(TwoOptimizers), lambda: built(optimizer=scaled())],
    ids=["own", "two-optimizers", "loss-scale"],
)
def test_gradients_then_updates_are_the_whole_step(make, xla):
    whole, halves = make(), make()
    for _ in range(3):
        whole.train_step(BATCH)
    backward = Backward(halves, halves.train_step)
    run = tf.function(backward, jit_compile=xla, autograph=False)
    for _ in range(3):
        before = [w.numpy() for w in halves.weights]
        logs, gradients = run(BATCH)
        for weight, value in zip(halves.weights, before, strict=True):
            np.testing.assert_array_equal(weight, value)
        backward.update(gradients)
    assert np.isfinite(float(logs["loss"]))
    for mine, theirs in zip(whole.weights, halves.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_optimizers_are_given_back():
    model = built()
    names = set(vars(model.optimizer))
    Backward(model, model.train_step)(BATCH)
    assert set(vars(model.optimizer)) == names
    assert not model.optimizer.iterations.numpy()
