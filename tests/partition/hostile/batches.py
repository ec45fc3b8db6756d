"""Steps that sort a batch, take its statistics or decide by it."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases.table import images
from tests.partition.hostile.table import (
    built,
    fitted,
    hand,
    mlp,
    net,
    state,
)

# Losses of whole batches, and of what is sorted


@fitted()
def quantiles_of_keras():
    def pinball(y, p):
        levels = tf.constant([0.1, 0.5, 0.9])
        return tf.reduce_mean(
            tf.maximum(levels * (y - p), (levels - 1) * (y - p)), -1
        )

    model = mlp(8, 3)
    model.compile(
        keras.optimizers.Adam(0.01), pinball, weighted_metrics=["mae"]
    )
    model.jit_compile = False
    return model


@hand(net=net(8, 1))
def cox(m, x, y):
    """Partial likelihood of who is at risk when someone else is gone."""
    risk, time = m.net(x)[:, 0], y[:, 0]
    order = tf.argsort(time, direction="DESCENDING")
    risk, event = tf.gather(risk, order), tf.gather(time > 0, order)
    at_risk = tf.math.cumulative_logsumexp(risk)
    event = tf.cast(event, tf.float32)
    return -tf.reduce_sum((risk - at_risk) * event) / (
        tf.reduce_sum(event) + 1e-7
    )


@hand(net=net(8, 2))
def concordance_and_wasserstein(m, x, y):
    p, extra = tf.unstack(m.net(x), axis=1)
    y = y[:, 0]
    (mp, vp), (my, vy) = tf.nn.moments(p, 0), tf.nn.moments(y, 0)
    both = tf.reduce_mean((p - mp) * (y - my))
    concordance = 2 * both / (vp + vy + (mp - my) ** 2 + 1e-3)
    far = tf.reduce_mean(tf.abs(tf.sort(extra) - tf.sort(y)))
    return 1 - concordance + far


@hand(net=net(8, 1))
def trimmed_by_a_median(m, x, y):
    lost = tf.abs(m.net(x) - y)[:, 0]
    ranked = tf.sort(lost)
    n = tf.shape(lost)[0]
    median = ranked[n // 2]
    spread = tf.sort(tf.abs(lost - median))[(n - 1) // 2]
    keep = tf.cast(lost <= median + 2 * spread, tf.float32)
    quantile = ranked[tf.cast(0.8 * tf.cast(n - 1, tf.float32), tf.int32)]
    huber = tf.where(lost < quantile, lost**2, 2 * quantile * lost)
    return tf.reduce_sum(keep * huber) / tf.reduce_sum(keep)


# Statistics of batches


@hand(net=net(8, 4), head=net(1, shape=(4,)))
def whitened_by_zca(m, x, y):
    z = m.net(x)
    z -= tf.reduce_mean(z, 0)
    n = tf.cast(tf.shape(z)[0], tf.float32)
    cov = tf.matmul(z, z, transpose_a=True) / n
    cov += tf.linalg.diag([0.2, 0.4, 0.6, 0.8])
    values, vectors = tf.linalg.eigh(cov)
    root = vectors @ tf.linalg.diag(values**-0.5) @ tf.transpose(vectors)
    return tf.reduce_mean((m.head(z @ root) - y) ** 2)


@fitted(images)
def spectral_and_standardised():
    class Standardised(layers.Conv2D):
        def convolution_op(self, inputs, kernel):
            mean, var = ops.moments(kernel, [0, 1, 2], keepdims=True)
            kernel = (kernel - mean) / ops.sqrt(var + 1e-5)
            return super().convolution_op(inputs, kernel)

    model = built(
        Standardised(4, 3, activation="relu"),
        layers.GroupNormalization(2),
        layers.SpectralNormalization(layers.Conv2D(3, 3)),
        layers.UnitNormalization(),
        layers.Flatten(),
        layers.Dense(1),
        shape=(6, 6, 2),
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.jit_compile = False
    return model


# What depends on numbers of the step


@hand(net=net(8, 1), calls=lambda: state(dtype="int64"))
def branch_by_the_loss(m, x, y):
    p = m.net(x)
    mse = tf.reduce_mean((p - y) ** 2)
    m.calls.assign_add(1)
    return tf.cond(
        mse > 1.5,
        lambda: tf.reduce_mean(tf.abs(p - y)),
        lambda: tf.switch_case(
            tf.cast(m.calls % 2, tf.int32),
            [lambda: mse, lambda: mse + tf.reduce_max(tf.abs(p))],
        ),
    )


@hand(net=net(8, 1))
def written_for_autograph(m, x, y):
    @tf.function
    def lost(p, y):
        far = tf.abs(p - y)
        worst = tf.reduce_max(far)
        while worst > 1.0:
            far = far / 2
            worst = tf.reduce_max(far)
        total = 0.0
        for row in far:
            if row[0] > 0.5:
                continue
            total += row[0]
        if tf.reduce_any(p > 10.0):
            return total
        return total / tf.cast(tf.shape(y)[0], tf.float32)

    return lost(m.net(x), y)


COUNTED = []


@hand(net=net(8, 1))
def counted_by_numpy(m, x, y):
    p = m.net(x)

    def rank(values):
        COUNTED.append(len(values))
        return values.argsort(0).argsort(0).astype("float32")

    ranks = tf.numpy_function(rank, [p], tf.float32)
    ranks = tf.stop_gradient(tf.reshape(ranks, tf.shape(p)))
    tf.debugging.assert_all_finite(p, "not finite")
    tf.debugging.assert_equal(tf.shape(p)[0], tf.shape(y)[0])
    lost = tf.reduce_mean((p - y) ** 2 * (1 + ranks))
    tf.print("", lost, end="", output_stream="file:///dev/null")
    return lost


def table():
    made = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    made.insert(tf.range(2), [0.5, 2.0])
    return made
