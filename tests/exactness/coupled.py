"""A training step whose loss and gradients need the whole batch."""

import keras
import tensorflow as tf

from tests.exactness import models as m

WIDTH = 4


class Contrastive(keras.Model):
    """A step by hand: each of two views finds the other among all views.

    Its views are centred over the batch, and what it applies is not linear in
    its gradients.
    """

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.body = keras.Sequential(
            [keras.Input((6,)), dense(7, "tanh"), dense(WIDTH)]
        )

    def call(self, x):
        return self.body(x)

    def _loss(self, x):
        z = self.body(x)
        z -= tf.reduce_mean(z, 0)
        views = tf.math.l2_normalize(tf.concat([z, z + 0.2], 0), 1)
        count = tf.shape(views)[0]
        near = tf.matmul(views, views, transpose_b=True) / 0.3
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.roll(tf.range(count), count // 2, 0),
                near - 1e9 * tf.eye(count),
            )
        )

    def train_step(self, data):
        x, *_ = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self._loss(x)
        gradients = [
            None if g is None else tf.tanh(3.0 * tf.convert_to_tensor(g))
            for g in tape.gradient(loss, variables)
        ]
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


def contrastive():
    """A built and compiled ``Contrastive``."""
    keras.utils.set_random_seed(1)
    model = Contrastive()
    model.build((None, 6))
    model.compile(m.momentum())
    model.optimizer.build(model.trainable_variables)
    return model
