"""Steps in which examples meet, or whose sizes follow from the data."""

import numpy as np
import tensorflow as tf

from tests.partition.cases import table as t


def _mostly_positive():
    """Targets of which each share of a batch has some above zero."""
    signs = np.where(np.arange(t.EXAMPLES) % 3, -1.0, 1.0)
    return t.normal(t.WIDTH), signs[:, None].astype("float32")


@t.step(_mostly_positive)
def reshaped_by_positives(m, x, y):
    k = tf.reduce_sum(tf.cast(y > 0, tf.int32))
    w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])
    return t.default_loss(m, x, y) * tf.reduce_sum(w[0])


@t.step(net=t.mlp(8, 1))
def learned_by_an_inner_step(m, x, y):
    """Adapt to half of the batch; be judged by the other half."""
    half = (t.rows(x) + 1) // 2
    w, b = m.net.layers[0].weights
    v, c = m.net.layers[1].weights

    def lost(w, b, v, c, x, y):
        return t.mse(y, tf.tanh(x @ w + b) @ v + c)

    fast = [one.value for one in (w, b, v, c)]
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(fast)
            loss = lost(*fast, x[:half], y[:half])
        gradients = tape.gradient(loss, fast)
        fast = [f - 0.1 * g for f, g in zip(fast, gradients, strict=True)]
    return lost(*fast, x[half - 1 :], y[half - 1 :])
