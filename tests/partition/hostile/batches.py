"""Steps that sort a batch, take its statistics or decide by it."""

import keras
import tensorflow as tf

from tests.partition.hostile.table import (
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
