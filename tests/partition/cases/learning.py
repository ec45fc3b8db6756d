"""Gradients of gradients, and gradients of one's own."""

import keras
import tensorflow as tf

from tests.partition.cases import table as t


@t.step(net=t.mlp(8, 2), factors=lambda: keras.Variable([1.0, 1.0]))
def gradnorm(m, x, y):
    shared = m.net.layers[0].kernel
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape(persistent=True) as tape:
            p = m.net(x)
            tasks = [
                tf.reduce_mean((p[:, :1] - y) ** 2),
                tf.reduce_mean(tf.abs(p[:, 1:] - y**2)),
            ]
            weighed = [m.factors[i] * task for i, task in enumerate(tasks)]
            total = tf.add_n(weighed)
        norms = tf.stack([tf.norm(tape.gradient(w, shared)) for w in weighed])
        rate = tf.stop_gradient(tf.stack(tasks) / tf.add_n(tasks))
        target = tf.stop_gradient(tf.reduce_mean(norms)) * rate**0.5
        balance = tf.reduce_sum(tf.abs(norms - target))
    trained = m.net.trainable_variables
    gradients = outer.gradient(total, trained)
    change = outer.gradient(balance, m.factors.value)
    m.optimizer.apply(gradients + [change], trained + [m.factors])
    m.factors.assign(2 * m.factors / tf.reduce_sum(m.factors))
    return {"loss": total, "balance": balance}


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


@tf.custom_gradient
def _reversed_gradient(x):
    return tf.identity(x), lambda g: -0.3 * g


@tf.custom_gradient
def _normalized_gradient(x):
    return x + 0, lambda g: g / (tf.norm(g) + 1e-6)


@t.step(
    t.classes,
    net=t.mlp(8, 4),
    label=t.mlp(3, shape=(4,)),
    domain=t.mlp(1, shape=(4,)),
)
def domain_adversaries(m, x, y):
    z = m.net(x)
    half = tf.cast(tf.range(t.rows(x)) < t.rows(x) // 2, tf.float32)
    domain = m.domain(_reversed_gradient(z))[:, 0]
    lost = tf.nn.sigmoid_cross_entropy_with_logits(half, domain)
    ours = t.cross_entropy(y, m.label(_normalized_gradient(z)))
    return tf.reduce_mean(lost) + tf.reduce_mean(ours)
