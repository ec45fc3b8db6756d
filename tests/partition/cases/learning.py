"""Several optimizers, gradients of gradients, decisions and codes."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.partition.cases.by_hand import down, hand, mlp, net, noted, state
from tests.partition.cases.table import generator, normal, numbers, whole


class Gan(keras.Model):
    def __init__(self, penalty):
        super().__init__()
        self.g, self.d, self.penalty = mlp(8, 6), mlp(8, 1), penalty
        self.kept = keras.metrics.Mean("d_loss")

    def compile(self):
        super().compile(keras.optimizers.SGD(0.05), jit_compile=False)
        self.others = [keras.optimizers.RMSprop(0.01)]

    def train_step(self, data):
        x, _ = data
        n = tf.shape(x)[0]
        for step in range(2):
            z = tf.random.stateless_normal([n, 6], [step, 1])
            with tf.GradientTape() as tape:
                fake = self.g(z)
                loss = self._critic(x, fake, n)
            down_by(self.others[0], tape, loss, self.d)
        self.kept.update_state(loss)
        z = tf.random.stateless_normal([n, 6], [5, 1])
        with tf.GradientTape() as tape:
            ours = self.d(self.g(z))
            ours = -tf.reduce_mean(ours if self.penalty else log_of(ours))
        down_by(self.optimizer, tape, ours, self.g)
        return {"g": ours, "d": self.kept.result()}

    def _critic(self, x, fake, n):
        if not self.penalty:
            both = tf.concat([fake, x], 0)
            labels = tf.concat([tf.ones((n, 1)), tf.zeros((n, 1))], 0)
            labels += 0.05 * tf.random.stateless_uniform(
                tf.shape(labels), [7, 7]
            )
            return tf.reduce_mean(
                keras.losses.binary_crossentropy(labels, self.d(both), True)
            )
        alpha = tf.random.stateless_uniform([n, 1], [9, 1])
        mixed = x + alpha * (fake - x)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.d(mixed)
        slope = tape.gradient(score, mixed)
        norm = tf.sqrt(tf.reduce_sum(slope**2, 1) + 1e-8)
        lost = tf.reduce_mean(self.d(fake)) - tf.reduce_mean(self.d(x))
        return lost + 10 * tf.reduce_mean((norm - 1) ** 2)


def log_of(logits):
    return tf.math.log_sigmoid(logits)


def down_by(optimizer, tape, loss, of):
    weights = of.trainable_weights
    optimizer.apply(tape.gradient(loss, weights), weights)


def _gan(penalty):
    model = Gan(penalty)
    model.compile()
    return model


noted("gan", lambda: _gan(False), numbers)
noted("wgan_gp", lambda: _gan(True), numbers)


@hand(net=net(8, 2), weights_=lambda: keras.Variable([1.0, 1.0]))
def gradnorm(m, x, y):
    shared = m.net.layers[0].kernel
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape(persistent=True) as tape:
            p = m.net(x)
            tasks = [
                tf.reduce_mean((p[:, :1] - y) ** 2),
                tf.reduce_mean(tf.abs(p[:, 1:] - y**2)),
            ]
            weighed = [m.weights_[i] * task for i, task in enumerate(tasks)]
            total = tf.add_n(weighed)
        norms = tf.stack([tf.norm(tape.gradient(w, shared)) for w in weighed])
        rate = tf.stop_gradient(tf.stack(tasks) / tf.add_n(tasks))
        target = tf.stop_gradient(tf.reduce_mean(norms)) * rate**0.5
        balance = tf.reduce_sum(tf.abs(norms - target))
    trained = m.net.trainable_variables
    gradients = outer.gradient(total, trained)
    change = outer.gradient(balance, m.weights_.value)
    m.optimizer.apply(gradients + [change], trained + [m.weights_])
    m.weights_.assign(2 * m.weights_ / ops.sum(m.weights_))
    return {"loss": total, "balance": balance}


@hand(net=net(8, 1))
def hessian_vector_product(m, x, y):
    weights = [w.value for w in m.trainable_variables]
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((m.net(x) - y) ** 2)
        first = tape.gradient(loss, weights)
    second = outer.gradient(
        first, weights, [tf.stop_gradient(g) for g in first]
    )
    m.optimizer.apply(
        [g + 0.1 * h for g, h in zip(first, second, strict=True)],
        m.trainable_variables,
    )
    curve = tf.add_n(
        [tf.reduce_sum(g * h) for g, h in zip(first, second, strict=True)]
    )
    return {"loss": loss, "curve": curve}


def _episodes():
    taken = np.stack([whole(3), normal()[:, None][:, 0] > 0], 1)
    return {"state": normal(6), "action": taken[:, 0]}, normal(1)


@hand(_episodes, net=net(8, 4), old=net(8, 4))
def ppo(m, x, y):
    m.old.trainable = False
    action, rewards = tf.cast(x["action"], tf.int32), y[:, 0]
    returns = tf.math.cumsum(rewards * 0.99, reverse=True)
    out = m.net(x["state"])
    logits, value = out[:, :3], out[:, 3]
    advantage = tf.stop_gradient(returns - value)
    advantage -= tf.reduce_mean(advantage)
    advantage /= tf.math.reduce_std(advantage) + 1e-2
    index = tf.stack([tf.range(tf.size(action)), action], 1)
    now = tf.gather_nd(tf.nn.log_softmax(logits), index)
    before = tf.gather_nd(tf.nn.log_softmax(m.old(x["state"])[:, :3]), index)
    ratio = tf.exp(now - before)
    clipped = tf.clip_by_value(ratio, 0.8, 1.2)
    policy = -tf.reduce_mean(tf.minimum(ratio * advantage, clipped * advantage))
    p = tf.nn.softmax(logits)
    entropy = -tf.reduce_mean(tf.reduce_sum(p * tf.math.log(p + 1e-8), 1))
    return policy + tf.reduce_mean((returns - value) ** 2) - 0.01 * entropy


def codes():
    given = generator().normal(size=(4, 5)).astype("float32")
    return tf.Variable(given, trainable=False)


@hand(
    encoder=net(8, 4),
    decoder=net(8, 6, shape=(4,)),
    codes=codes,
    counts=lambda: state(5, value=1.0),
    sums=codes,
)
def vq_vae(m, x, y):
    with tf.GradientTape() as tape:
        z = m.encoder(x)
        far = (
            tf.reduce_sum(z**2, 1, keepdims=True)
            - 2 * z @ m.codes
            + tf.reduce_sum(m.codes**2, 0)
        )
        chosen = tf.one_hot(tf.argmin(far, 1), 5)
        q = tf.matmul(chosen, m.codes, transpose_b=True)
        again = m.decoder(z + tf.stop_gradient(q - z))
        loss = tf.reduce_mean((again - x) ** 2)
        loss += 0.25 * tf.reduce_mean((tf.stop_gradient(q) - z) ** 2)
    down(m, tape, loss)
    m.counts.assign(0.9 * m.counts + 0.1 * tf.reduce_sum(chosen, 0))
    m.sums.assign(0.9 * m.sums + 0.1 * tf.matmul(z, chosen, transpose_a=True))
    n = tf.reduce_sum(m.counts)
    m.codes.assign(m.sums / ((m.counts + 1e-5) / (n + 5e-5) * n))
    mean = tf.reduce_mean(chosen, 0)
    perplexity = tf.exp(-tf.reduce_sum(mean * tf.math.log(mean + 1e-10)))
    return {"loss": loss, "perplexity": perplexity}
