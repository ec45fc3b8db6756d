"""Losses over the batch: contrastive, self-supervised, clusters."""

import keras
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import (
    Own,
    built,
    case,
    dense,
    floats,
    ints,
)


def unit(x):
    return tf.math.l2_normalize(x, -1)


@case
def triplets_mined_by_boolean_mask():
    class Triplet(Own):
        def loss_of(self, x, y):
            z = self.net(x)
            d = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
            same = tf.equal(y[:, None], y[None])
            ap = tf.logical_and(
                same, tf.logical_not(tf.eye(tf.shape(z)[0], dtype="bool"))
            )
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

    return (
        built(Triplet(net=dense(8, 3, bias=False)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def center_loss_with_moving_centres():
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
                unique, index, counts = tf.unique_with_counts(y)
                step = (
                    0.5
                    * apart
                    / tf.cast(1 + tf.gather(counts, index), "float32")[:, None]
                )
                self.centers.assign(
                    tf.tensor_scatter_nd_add(self.centers, y[:, None], step)
                )
            return z

    x, y = keras.Input((6,)), keras.Input((1,), dtype="int64")
    z = keras.layers.Dense(3)(keras.layers.Dense(8, "gelu")(x))
    z = Center()([z, y])
    model = keras.Model([x, y], keras.layers.Dense(4, "softmax")(z))
    model.compile(
        "rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    labels = ints(4, 20, 1)
    return model, [floats(20, 6), labels], labels


@case
def prototypical_episodes():
    """The first half of a batch are the support of the second."""

    class Proto(Own):
        def loss_of(self, x, y):
            half = tf.shape(x)[0] // 2
            z = self.net(x)
            support, query = z[:half], z[half:]
            prototypes = tf.math.unsorted_segment_mean(support, y[:half], 3)
            d = tf.reduce_sum((query[:, None] - prototypes[None]) ** 2, -1)
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
                y[half:], -d
            )
            seen = tf.gather(
                tf.math.unsorted_segment_sum(
                    tf.ones_like(y[:half], "float32"), y[:half], 3
                ),
                y[half:],
            )
            mask = tf.cast(seen > 0, "float32")
            loss = tf.math.divide_no_nan(
                tf.reduce_sum(entropy * mask), tf.reduce_sum(mask)
            )
            return {"loss": loss, "seen": tf.reduce_mean(mask)}

    return (
        built(Proto(net=dense(8, 4)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def nnclr_with_a_feature_queue():
    class NnClr(Own):
        def create(self):
            self.queue = self.add_weight(
                shape=(10, 4),
                initializer=keras.initializers.RandomNormal(1, seed=5),
                trainable=False,
            )

        def neighbours(self, z):
            near = tf.matmul(
                z, tf.convert_to_tensor(self.queue), transpose_b=True
            )
            found = tf.gather(self.queue, tf.argmax(near, 1))
            return z + tf.stop_gradient(found - z)

        def loss_of(self, x, y):
            a, b = unit(self.net(x)), unit(self.net(x * 1.1 + 0.05))
            labels = tf.range(tf.shape(x)[0])
            losses = []
            for one, two in ((a, b), (b, a)):
                logits = (
                    tf.matmul(self.neighbours(one), two, transpose_b=True) / 0.3
                )
                losses += [
                    keras.losses.sparse_categorical_crossentropy(
                        labels, m, True
                    )
                    for m in (logits, tf.transpose(logits))
                ]
            self.queue.assign(tf.concat([a, self.queue], 0)[:10])
            return tf.reduce_mean(tf.stack(losses))

    return built(NnClr(net=dense(8, 4)), floats(2, 6)), floats(20, 6), None


@case
def hardest_negatives_by_top_k():
    class Hard(Own):
        def loss_of(self, x, y):
            z = unit(self.net(x))
            s = tf.matmul(z, z, transpose_b=True)
            same = tf.equal(y[:, None], y[None])
            count = tf.shape(z)[0]
            k = tf.minimum(3, count)
            hard_n = tf.math.top_k(tf.where(same, -9.0, s), k).values
            hard_p = -tf.math.top_k(-tf.where(same, s, 9.0), k).values
            # Circle loss
            an, ap = tf.nn.relu(hard_n + 0.25), tf.nn.relu(1.25 - hard_p)
            ln = tf.reduce_logsumexp(
                4 * tf.stop_gradient(an) * (hard_n - 0.25), 1
            )
            lp = tf.reduce_logsumexp(
                -4 * tf.stop_gradient(ap) * (hard_p - 0.75), 1
            )
            return tf.reduce_mean(tf.nn.softplus(ln + lp))

    return (
        built(Hard(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def histogram_loss_over_all_pairs():
    class Histogram(Own):
        def soft(self, s, mask):
            nodes = tf.linspace(-1.0, 1.0, 9)
            near = tf.nn.relu(1 - tf.abs(s[..., None] - nodes) * 4)
            near *= tf.cast(mask, "float32")[..., None]
            return tf.math.divide_no_nan(
                tf.reduce_sum(near, [0, 1]),
                tf.reduce_sum(tf.cast(mask, "float32")),
            )

        def loss_of(self, x, y):
            z = unit(self.net(x))
            s = tf.matmul(z, z, transpose_b=True)
            upper = tf.linalg.band_part(tf.ones_like(s), 0, -1) - tf.eye(
                tf.shape(s)[0]
            )
            same = tf.equal(y[:, None], y[None])
            p = self.soft(s, same & (upper > 0))
            n = self.soft(s, ~same & (upper > 0))
            return tf.reduce_sum(n * tf.cumsum(p))

    return (
        built(Histogram(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )
