"""Train a model with its own ``train_step`` on towers, by one line.

``python examples/own_model.py``. ``kt.verify`` measures how far the step on
towers is from the step on one device.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt

kt.virtual_towers(4)  # splits the CPU; leave it out with GPUs

x = np.random.default_rng(0).random((1000, 20), "float32")
y = x.sum(axis=1, keepdims=True)


class Robust(keras.Model):
    """Plain Keras: nothing in it knows of towers."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(64, "relu")
        self.mean = keras.layers.Dense(1)
        self.scale = keras.layers.Dense(1, "softplus")
        self.loss_mean = keras.metrics.Mean("loss")

    def call(self, inputs):
        hidden = self.hidden(inputs)
        return self.mean(hidden), self.scale(hidden) + 1e-3

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            mean, scale = self(inputs, training=True)
            errors = tf.abs(targets - mean) / scale + tf.math.log(scale)
            loss = tf.reduce_mean(errors)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.loss_mean.update_state(loss)
        return {"loss": self.loss_mean.result()}


keras.utils.set_random_seed(1)
model = Robust()
model.compile(keras.optimizers.Adam(1e-3, global_clipnorm=1.0))
print(kt.verify(model, x, y))

with kt.TowerStrategy():  # this line
    history = model.fit(x, y, batch_size=50, epochs=5)
