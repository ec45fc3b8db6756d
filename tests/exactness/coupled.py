"""Training steps whose losses and gradients need the whole batch."""

import keras
import tensorflow as tf

from tests.exactness import models as m

WIDTH = 4


def _entropy(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def _similar(a, b):
    return tf.matmul(a, b, transpose_b=True) / 0.3


def _each_finds_the_other(views):
    count = tf.shape(views)[0]
    logits = _similar(views, views) - 1e9 * tf.eye(count)
    labels = tf.roll(tf.range(count), count // 2, 0)
    return tf.reduce_mean(_entropy(logits, labels))


def simclr(model, x, y):
    """NT-Xent of two views: each finds the other among all views."""
    views = model.unit(x * 1.1), model.unit(x + 0.2)
    return _each_finds_the_other(tf.concat(views, 0))


def supervised_contrastive(model, x, y):
    z = model.unit(x)
    own = tf.eye(tf.shape(z)[0])
    log = tf.nn.log_softmax(_similar(z, z) - 1e9 * own)
    same = tf.cast(y[:, None] == y[None], tf.float32) * (1 - own)
    losses = tf.math.divide_no_nan(
        tf.reduce_sum(same * log, 1), tf.reduce_sum(same, 1)
    )
    return -tf.reduce_mean(losses)


def centred_views(model, x, y):
    """Two views in one tensor, less their mean over the batch."""
    z = model.body(x)
    z -= tf.reduce_mean(z, 0)
    views = tf.concat([z, z + 0.2], 0)
    return _each_finds_the_other(tf.math.l2_normalize(views, 1))


def _losses(model, x, y):
    logits = model.body(x)
    return logits, _entropy(logits, y)


def penalty_on_a_mean(model, x, y):
    logits, losses = _losses(model, x, y)
    usage = tf.reduce_mean(tf.nn.softmax(logits), 0)
    return tf.reduce_mean(losses) + tf.reduce_sum(usage * usage)


def clipped(model, gradients):
    gradients, model.norm = tf.clip_by_global_norm(gradients, 0.1)
    return gradients


def signs(model, gradients):
    """Not linear in the gradients."""
    return [
        None if g is None else tf.tanh(3.0 * tf.convert_to_tensor(g))
        for g in gradients
    ]


class Coupled(keras.Model):
    """A step of the user's own."""

    def __init__(self, loss, by_hand):
        super().__init__()
        dense = keras.layers.Dense
        self.body = keras.Sequential(
            [keras.Input((6,)), dense(7, "tanh"), dense(WIDTH)]
        )
        self.norm = 0.0  # of the gradients of the last step
        self.loss_of, self.by_hand = loss, by_hand

    def call(self, x):
        return self.body(x)

    def unit(self, x):
        return tf.math.l2_normalize(self.body(x), 1)

    def train_step(self, data):
        x, y, *_ = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        gradients = self.by_hand(self, tape.gradient(loss, variables))
        self.optimizer.apply(gradients, variables)
        return {"loss": loss, "norm": self.norm}


def coupled(loss, by_hand):
    """A function that makes such a model, the same every time."""

    def make():
        keras.utils.set_random_seed(1)
        model = Coupled(loss, by_hand)
        model.build((None, 6))
        model.compile(m.momentum())
        model.optimizer.build(model.trainable_variables)
        return model

    return make
