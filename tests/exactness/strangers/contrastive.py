"""Losses over the batch: contrastive, self-supervised, clusters."""

import keras
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import (
    Own,
    case,
    dense,
    floats,
    ints,
    step,
)


def unit(x):
    return tf.math.l2_normalize(x, -1)


@step(floats(20, 6), ints(3, 20), net=lambda: dense(8, 3, bias=False))
class TripletsMinedByBooleanMask(Own):
    def loss_of(self, x, y):
        z = self.net(x)
        d = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
        same = tf.equal(y[:, None], y[None])
        ap = same & ~tf.eye(tf.shape(z)[0], dtype="bool")
        triplets = tf.where(ap[:, :, None] & ~same[:, None, :])
        a, p, n = tf.unstack(tf.transpose(triplets))
        margin = (
            tf.gather_nd(d, tf.stack([a, p], 1))
            - tf.gather_nd(d, tf.stack([a, n], 1))
            + 0.5
        )
        semi = tf.boolean_mask(margin, (margin > 0) & (margin < 0.8))
        count = tf.cast(tf.size(semi), "float32")
        return {
            "loss": tf.math.divide_no_nan(tf.reduce_sum(semi), count),
            "active": count,
        }


class Center(keras.layers.Layer):
    def build(self, shape):
        self.centers = self.add_weight(
            shape=(4, 3), trainable=False, initializer="zeros"
        )

    def call(self, inputs, training=False):
        z, y = inputs
        y = ops.cast(y[:, 0], "int32")
        apart = z - tf.gather(self.centers, y)
        self.add_loss(0.5 * tf.reduce_mean(tf.reduce_sum(apart**2, -1)))
        if training:
            _, index, counts = tf.unique_with_counts(y)
            seen = tf.cast(1 + tf.gather(counts, index), "float32")[:, None]
            self.centers.assign(
                tf.tensor_scatter_nd_add(
                    self.centers, y[:, None], 0.5 * apart / seen
                )
            )
        return z


@case
def center_loss_with_moving_centres():
    x, y = keras.Input((6,)), keras.Input((1,), dtype="int64")
    z = keras.layers.Dense(3)(keras.layers.Dense(8, "gelu")(x))
    z = Center()([z, y])
    model = keras.Model([x, y], keras.layers.Dense(4, "softmax")(z))
    model.compile(
        "rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    labels = ints(4, 20, 1)
    return model, [floats(20, 6), labels], labels


@step(floats(20, 6), net=(8, 4))
class NnclrWithAFeatureQueue(Own):
    def create(self):
        self.queue = self.add_weight(
            shape=(10, 4),
            initializer=keras.initializers.RandomNormal(1, seed=5),
            trainable=False,
        )

    def neighbours(self, z):
        near = tf.matmul(z, tf.convert_to_tensor(self.queue), transpose_b=True)
        found = tf.gather(self.queue, tf.argmax(near, 1))
        return z + tf.stop_gradient(found - z)

    def loss_of(self, x, y):
        a, b = unit(self.net(x)), unit(self.net(x * 1.1 + 0.05))
        labels = tf.range(tf.shape(x)[0])
        losses = []
        for one, two in ((a, b), (b, a)):
            logits = tf.matmul(self.neighbours(one), tf.transpose(two)) / 0.3
            losses += [
                keras.losses.sparse_categorical_crossentropy(labels, m, True)
                for m in (logits, tf.transpose(logits))
            ]
        self.queue.assign(tf.concat([a, self.queue], 0)[:10])
        return tf.reduce_mean(tf.stack(losses))
