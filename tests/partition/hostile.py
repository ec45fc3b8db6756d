"""Steps as users write them, after published examples and research code.

Batches have sixteen examples; the last has one.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.splitting.cases.table import (
    Case,
    classes,
    generator,
    images,
    normal,
    numbers,
    tokens,
    whole,
)

STEPS = {}
BATCH = 16


class Hand(keras.Model):
    """A model of some parts, with a step that is written by hand.

    Args:
        step: takes the model and a batch; returns a loss of what is trained,
            or logs if it trains by itself.
        parts: layers and models by their names.
    """

    def __init__(self, step, **parts):
        super().__init__()
        self._by_hand = step
        for name, part in parts.items():
            setattr(self, name, part)

    def train_step(self, data):
        x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
        with tf.GradientTape() as tape:
            loss = self._by_hand(self, x, y)
            if isinstance(loss, dict):
                return loss
        down(self, tape, loss)
        return {"loss": loss}


def down(model, tape, loss, variables=None):
    variables = model.trainable_variables if variables is None else variables
    gradients = tape.gradient(loss, variables)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))


def mlp(*units, shape=(6,), **options):
    hidden = [layers.Dense(n, "tanh") for n in units[:-1]]
    return built(*hidden, layers.Dense(units[-1], **options), shape=shape)


def built(*given, shape=(6,)):
    return keras.Sequential([keras.Input(shape), *given])


def state(*shape, value=0.0, dtype="float32"):
    return tf.Variable(tf.fill(shape, tf.cast(value, dtype)), trainable=False)


def hand(data=numbers, optimizer=None, **parts):
    """Note a step that gets a model of parts, which functions make."""

    def register(step):
        def build():
            model = Hand(step, **{name: make() for name, make in parts.items()})
            made = optimizer() if optimizer else keras.optimizers.SGD(0.05)
            model.compile(made, jit_compile=False)
            return model

        return noted(step.__name__, build, data)

    return register


def fitted(data=numbers, **options):
    """Note a step of Keras's own, of a compiled model."""

    def register(build):
        return noted(build.__name__, build, data, **options)

    return register


def noted(name, build, data, **options):
    assert name not in STEPS
    options = {"batch_size": BATCH, **options}
    STEPS[name] = Case(build, "", data, functools.partial(dict, options), None)
    return build


def net(*units, **options):
    return functools.partial(mlp, *units, **options)


def unit(z):
    return tf.math.l2_normalize(z, -1)


def views(x):
    return x + 0.1 * tf.sin(7 * x), x * tf.cast(tf.cos(3 * x) > 0, x.dtype)


# Representations


@hand(net=net(8, 4))
def simclr(m, x, y):
    a, b = (unit(m.net(v)) for v in views(x))
    z = tf.concat([a, b], 0)
    n = tf.shape(x)[0]
    logits = z @ tf.transpose(z) / 0.5 - 1e9 * tf.eye(2 * n)
    labels = tf.concat([tf.range(n, 2 * n), tf.range(n)], 0)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


@hand(net=net(8, 4))
def nearest_neighbours(m, x, y):
    a, b = (unit(m.net(v)) for v in views(x))
    n = tf.shape(a)[0]
    both = tf.matmul(a, b, transpose_b=True) / 0.1
    labels = tf.range(n)
    lost = keras.losses.sparse_categorical_crossentropy
    ab = lost(labels, both, from_logits=True)
    ba = lost(labels, tf.transpose(both), from_logits=True)
    right = tf.equal(tf.argmax(both, 1, tf.int32), labels)
    loss = tf.reduce_mean(ab + ba)
    return loss + 0 * tf.reduce_mean(tf.cast(right, tf.float32))


@hand(net=net(8, 4), queue=lambda: state(24, 4, value=0.5))
def moco(m, x, y):
    a, b = views(x)
    q, k = unit(m.net(a)), tf.stop_gradient(unit(m.net(b)))
    positive = tf.reduce_sum(q * k, 1, keepdims=True)
    logits = tf.concat([positive, q @ tf.transpose(unit(m.queue))], 1) / 0.2
    m.queue.assign(tf.concat([k, m.queue], 0)[:24])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.zeros(tf.shape(q)[0], tf.int32), logits
        )
    )


@hand(
    net=net(8, 4),
    queue=lambda: state(20, 4, value=0.5),
    at=lambda: state(dtype="int32"),
)
def moco_by_a_pointer(m, x, y):
    a, b = views(x)
    q, k = unit(m.net(a)), tf.stop_gradient(unit(m.net(b)))
    where = (m.at + tf.range(tf.shape(k)[0])) % 20
    logits = tf.matmul(q, m.queue, transpose_b=True)
    loss = tf.reduce_mean(
        tf.reduce_logsumexp(logits, 1) - tf.reduce_sum(q * k, 1)
    )
    m.queue.assign(tf.tensor_scatter_nd_update(m.queue, where[:, None], k))
    m.at.assign((m.at + tf.shape(k)[0]) % 20)
    return loss


@hand(net=net(8, 4), head=net(4, 4, shape=(4,)), teacher=net(8, 4))
def byol(m, x, y):
    m.teacher.trainable = False
    a, b = views(x)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            2
            - 2 * tf.reduce_sum(unit(m.head(m.net(a))) * unit(m.teacher(b)), 1)
        )
    down(m, tape, loss)
    for slow, fast in zip(m.teacher.weights, m.net.weights, strict=True):
        slow.assign(0.9 * slow + 0.1 * fast)
    return {"loss": loss}


@hand(net=net(8, 4))
def barlow_twins(m, x, y):
    a, b = (m.net(v) for v in views(x))
    a, b = (
        (z - tf.reduce_mean(z, 0)) / (tf.math.reduce_std(z, 0) + 1e-2)
        for z in (a, b)
    )
    n = tf.cast(tf.shape(a)[0], tf.float32)
    c = tf.matmul(a, b, transpose_a=True) / n
    on = tf.reduce_sum(tf.square(tf.linalg.diag_part(c) - 1))
    off = tf.linalg.set_diag(c, tf.zeros(tf.shape(c)[0]))
    return on + 0.005 * tf.reduce_sum(tf.square(off))


@hand(net=net(8, 4))
def vicreg(m, x, y):
    a, b = (m.net(v) for v in views(x))
    loss = tf.reduce_mean(tf.square(a - b))
    for z in (a, b):
        z -= tf.reduce_mean(z, 0)
        std = tf.sqrt(tf.math.reduce_variance(z, 0) + 1e-4)
        loss += tf.reduce_mean(tf.nn.relu(1 - std))
        n = tf.cast(tf.maximum(tf.shape(z)[0] - 1, 1), tf.float32)
        cov = tf.matmul(z, z, transpose_a=True) / n
        cov -= tf.linalg.diag(tf.linalg.diag_part(cov))
        loss += tf.reduce_sum(cov**2) / 4
    return loss


def sinkhorn(scores):
    q = tf.transpose(tf.exp(scores / 0.5))
    q /= tf.reduce_sum(q)
    k, n = tf.unstack(tf.cast(tf.shape(q), tf.float32))
    for _ in range(3):
        q /= tf.reduce_sum(q, 1, keepdims=True) * k
        q /= tf.reduce_sum(q, 0, keepdims=True) * n
    return tf.stop_gradient(tf.transpose(q * n))


@hand(net=net(8, 4), prototypes=net(5, shape=(4,), use_bias=False))
def swav(m, x, y):
    both = tf.concat(views(x), 0)
    a, b = tf.split(m.prototypes(unit(m.net(both))), 2)
    loss = 0.0
    for one, other in ((a, b), (b, a)):
        q = sinkhorn(one)
        loss -= tf.reduce_mean(
            tf.reduce_sum(q * tf.nn.log_softmax(other / 0.3), 1)
        )
    return loss


@hand(net=net(8, 4), teacher=net(8, 4), centre=lambda: state(1, 4))
def dino(m, x, y):
    m.teacher.trainable = False
    a, b = views(x)
    taught = m.teacher(b)
    target = tf.nn.softmax((taught - m.centre) / 0.3)
    with tf.GradientTape() as tape:
        loss = tf.nn.softmax_cross_entropy_with_logits(target, m.net(a) / 0.5)
        loss = tf.reduce_mean(loss)
    down(m, tape, loss)
    mean = tf.reduce_sum(taught, 0, keepdims=True)
    mean /= tf.cast(tf.shape(taught)[0], tf.float32)
    m.centre.assign(m.centre * 0.9 + mean * 0.1)
    for slow, fast in zip(m.teacher.weights, m.net.weights, strict=True):
        slow.assign_sub(0.1 * (slow - fast))
    return {"loss": loss, "centre": tf.norm(m.centre)}


def _pictures_and_texts():
    return {"image": normal(6, 6, 2), "text": whole(9, 8)}, whole(3)


@hand(
    _pictures_and_texts,
    image=lambda: built(
        layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(4), shape=(6, 6, 2)
    ),
    text=lambda: built(
        layers.Embedding(9, 4, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        shape=(8,),
    ),
    scale=lambda: keras.Variable(1.0),
)
def clip(m, x, y):
    a, b = unit(m.image(x["image"])), unit(m.text(x["text"]))
    logits = tf.exp(m.scale) * tf.matmul(a, b, transpose_b=True)
    labels = tf.eye(tf.shape(logits)[0])
    rows = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
    columns = tf.nn.softmax_cross_entropy_with_logits(
        tf.transpose(labels), tf.transpose(logits)
    )
    return tf.reduce_mean(rows + columns) / 2


@hand(
    _pictures_and_texts,
    image=lambda: built(layers.Flatten(), layers.Dense(4), shape=(6, 6, 2)),
    text=lambda: built(
        layers.Embedding(9, 4), layers.GlobalMaxPooling1D(), shape=(8,)
    ),
)
def soft_dual_encoder(m, x, y):
    a, b = m.image(x["image"]), m.text(x["text"])
    logits = tf.matmul(b, a, transpose_b=True)
    target = tf.nn.softmax(
        (tf.matmul(a, a, transpose_b=True) + tf.matmul(b, b, transpose_b=True))
        / 2
    )
    one = keras.losses.categorical_crossentropy(target, logits, True)
    other = keras.losses.categorical_crossentropy(
        ops.transpose(target), ops.transpose(logits), True
    )
    return tf.reduce_mean((one + other) / 2)


# Metric learning and mining


def distances(z):
    square = tf.reduce_sum(z**2, 1)
    d = square[:, None] - 2 * z @ tf.transpose(z) + square[None]
    return tf.sqrt(tf.maximum(d, 0.0) + 1e-6)


@hand(classes, net=net(8, 4))
def batch_hard_triplets(m, x, y):
    d, y = distances(m.net(x)), tf.reshape(y, [-1])
    same = tf.equal(y[:, None], y[None])
    off = tf.logical_not(tf.cast(tf.eye(tf.size(y)), tf.bool))
    positive = tf.cast(same & off, tf.float32)
    hardest = tf.reduce_max(d * positive, 1)
    far = tf.reduce_max(d, 1, keepdims=True)
    nearest = tf.reduce_min(d + far * tf.cast(same, tf.float32), 1)
    return tf.reduce_mean(tf.nn.relu(hardest - nearest + 1))


@hand(classes, net=net(8, 4))
def all_triplets(m, x, y):
    d, y = distances(m.net(x)), tf.squeeze(y, -1)
    same = tf.equal(y[:, None], y[None])
    off = ~tf.eye(tf.shape(y)[0], dtype=tf.bool)
    valid = (same & off)[:, :, None] & (~same)[:, None]
    lost = tf.nn.relu(d[:, :, None] - d[:, None] + 0.5)
    lost = tf.where(valid, lost, 0.0)
    count = tf.reduce_sum(tf.cast(lost > 1e-16, tf.float32))
    return tf.reduce_sum(lost) / (count + 1e-16)


@hand(classes, net=net(8, 4))
def supervised_contrastive(m, x, y):
    z = unit(m.net(x))
    logits = tf.matmul(z, z, transpose_b=True) / 0.3
    logits -= tf.stop_gradient(tf.reduce_max(logits, 1, keepdims=True))
    mask = tf.cast(tf.equal(y, tf.transpose(y)), tf.float32)
    others = 1 - tf.eye(tf.shape(z)[0])
    mask *= others
    logprob = logits - tf.math.log(
        tf.reduce_sum(tf.exp(logits) * others, 1, keepdims=True) + 1e-6
    )
    mean = tf.math.divide_no_nan(
        tf.reduce_sum(mask * logprob, 1), tf.reduce_sum(mask, 1)
    )
    return -tf.reduce_mean(mean)


def cross_entropy(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.reshape(y, [-1]), logits
    )


@hand(classes, net=net(8, 3))
def hardest_examples(m, x, y):
    lost = cross_entropy(y, m.net(x))
    keep = tf.cast(0.7 * tf.cast(tf.size(lost), tf.float32), tf.int32)
    top, _ = tf.math.top_k(lost, tf.maximum(keep, 1))
    return tf.reduce_mean(top)


@hand(classes, net=net(8, 3))
def hardest_negatives(m, x, y):
    y = tf.reshape(y, [-1])
    lost = cross_entropy(y, m.net(x))
    positive = y > 0
    count = tf.reduce_sum(tf.cast(positive, tf.int32))
    negative = tf.boolean_mask(lost, ~positive)
    k = tf.minimum(3 * count, tf.size(negative))
    hard = tf.sort(negative, direction="DESCENDING")[:k]
    total = tf.reduce_sum(tf.boolean_mask(lost, positive))
    total += tf.reduce_sum(hard)
    return total / tf.cast(tf.maximum(count, 1), tf.float32)


@hand(classes, net=net(8, 3))
def focal(m, x, y):
    y, p = tf.one_hot(tf.squeeze(y, -1), 3), tf.nn.softmax(m.net(x))
    frequency = tf.reduce_mean(y, 0)
    alpha = tf.gather(1 - frequency, tf.argmax(y, -1))
    pt = tf.reduce_sum(y * p, -1)
    return tf.reduce_mean(-alpha * (1 - pt) ** 2 * tf.math.log(pt + 1e-7))


@hand(classes, net=net(8, 3), groups=lambda: state(3, value=1 / 3))
def group_dro(m, x, y):
    g = tf.reshape(y, [-1])
    lost = cross_entropy(y, m.net(x))
    counts = tf.math.unsorted_segment_sum(tf.ones_like(lost), g, 3)
    means = tf.math.unsorted_segment_sum(lost, g, 3) / tf.maximum(counts, 1)
    weights = m.groups * tf.exp(0.1 * tf.stop_gradient(means))
    m.groups.assign(weights / tf.reduce_sum(weights))
    return tf.reduce_sum(m.groups * means)


@hand(classes, net=net(8, 3))
def mixup_by_hand(m, x, y):
    y = tf.one_hot(y[:, 0], 3)
    n = tf.shape(x)[0]
    order = tf.random.experimental.stateless_shuffle(tf.range(n), seed=[1, 2])
    part = tf.random.stateless_uniform([n, 1], seed=[3, 4])
    x = part * x + (1 - part) * tf.gather(x, order)
    y = part * y + (1 - part) * tf.gather(y, order)
    return tf.reduce_mean(
        keras.losses.categorical_crossentropy(y, m.net(x), from_logits=True)
    )


def conv():
    return built(
        layers.Conv2D(3, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1),
        shape=(6, 6, 2),
    )


@hand(images, net=conv)
def cutmix_by_hand(m, x, y):
    box = tf.pad(tf.ones([3, 2]), [[1, 2], [2, 2]])[None, :, :, None]
    area = tf.reduce_mean(box)
    x = x * (1 - box) + x[::-1] * box
    y = y * (1 - area) + tf.reverse(y, [0]) * area
    return tf.reduce_mean((m.net(x) - y) ** 2)


# Several optimizers and gradients of gradients


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


@hand(net=net(8, 1))
def sam(m, x, y):
    weights = m.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((m.net(x) - y) ** 2)
    gradients = tape.gradient(loss, weights)
    scale = 0.05 / (tf.linalg.global_norm(gradients) + 1e-12)
    for w, g in zip(weights, gradients, strict=True):
        w.assign_add(scale * g)
    with tf.GradientTape() as tape:
        again = tf.reduce_mean((m.net(x) - y) ** 2)
    there = tape.gradient(again, weights)
    for w, g in zip(weights, gradients, strict=True):
        w.assign_sub(scale * g)
    m.optimizer.apply(there, weights)
    return {"loss": loss, "sharp": again - loss}


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
def by_example(m, x, y):
    """Clip the gradient of every example, as private training does."""
    with tf.GradientTape() as tape:
        lost = (m.net(x) - y) ** 2
    weights = m.trainable_variables
    found = []
    for g in tape.jacobian(lost, weights):
        flat = tf.reshape(g, [tf.shape(g)[0], tf.size(g[0])])
        found.append(flat)
    norm = tf.norm(tf.concat(found, 1), axis=1, keepdims=True)
    factor = tf.minimum(1.0, 0.5 / norm)
    m.optimizer.apply(
        [
            tf.reshape(tf.reduce_mean(f * factor, 0), w.shape)
            for f, w in zip(found, weights, strict=True)
        ],
        weights,
    )
    return {"loss": tf.reduce_mean(lost), "clipped": tf.reduce_mean(factor)}


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


@hand(
    net=net(8, 1),
    step=lambda: state(dtype="int32"),
    kept=lambda: [state(6, 8), state(8), state(8, 1), state(1)],
)
def accumulated(m, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((m.net(x) - y) ** 2)
    weights = m.trainable_variables
    gradients = tape.gradient(loss, weights)
    gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
    m.step.assign_add(1)
    for kept, g in zip(m.kept, gradients, strict=True):
        kept.assign_add(g)

    def apply():
        m.optimizer.apply([kept / 2 for kept in m.kept], weights)
        for kept in m.kept:
            kept.assign(tf.zeros_like(kept))
        return True

    tf.cond(tf.equal(m.step % 2, 0), apply, lambda: False)
    return {"loss": loss, "norm": norm}


@hand(net=net(8, 1), scale=lambda: state(value=64.0), good=state)
def loss_scaled_by_hand(m, x, y):
    weights = m.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((m.net(x) - y) ** 2)
        scaled = loss * m.scale
    gradients = [g / m.scale for g in tape.gradient(scaled, weights)]
    finite = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    )

    def grow():
        m.optimizer.apply(gradients, weights)
        m.good.assign_add(1)
        return m.scale.assign(m.scale * tf.where(m.good > 2, 2.0, 1.0))

    tf.cond(finite, grow, lambda: m.scale.assign(m.scale / 2))
    return {"loss": loss, "scale": m.scale}


# Decisions, values and codes


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


@hand(_episodes, net=net(8, 4))
def actor_critic_by_a_scan(m, x, y):
    out = m.net(x["state"])
    rewards = y[:, 0]
    returns = tf.scan(
        lambda total, r: r + 0.9 * total,
        rewards[::-1],
        initializer=tf.constant(0.0),
    )[::-1]
    probability = tf.reduce_sum(
        tf.nn.softmax(out[:, :3]) * tf.one_hot(x["action"], 3), 1
    )
    gain = tf.stop_gradient(returns - out[:, 3])
    huber = keras.losses.Huber(reduction="sum")
    loss = -tf.reduce_sum(tf.math.log(probability) * gain)
    return loss + huber(returns[:, None], out[:, 3:])


@hand(_episodes, net=net(8, 3), target=net(8, 3), steps=state)
def double_dqn(m, x, y):
    m.target.trainable = False
    s = x["state"]
    after = tf.concat([s[1:], s[:1]], 0)
    best = tf.argmax(m.net(after), 1)
    future = tf.gather(m.target(after), best, axis=1, batch_dims=1)
    wanted = tf.stop_gradient(y[:, 0] + 0.9 * future)
    with tf.GradientTape() as tape:
        q = tf.gather(m.net(s), tf.cast(x["action"], tf.int32), batch_dims=1)
        loss = tf.reduce_mean(tf.abs(q - wanted))
    down(m, tape, loss)
    m.steps.assign_add(1)
    if tf.executing_eagerly():
        return {"loss": loss}

    def follow():
        for slow, fast in zip(m.target.weights, m.net.weights, strict=True):
            slow.assign(fast)
        return 1

    tf.cond(tf.equal(m.steps % 2, 0), follow, lambda: 0)
    return {"loss": loss}


@hand(encoder=net(8, 6), decoder=net(8, 6, shape=(3,)))
def vae(m, x, y):
    mean, log_var = tf.split(m.encoder(x), 2, 1)
    noise = tf.random.stateless_normal(tf.shape(mean), [1, 3])
    again = m.decoder(mean + tf.exp(0.5 * log_var) * noise)
    kl = -0.5 * (1 + log_var - mean**2 - tf.exp(log_var))
    kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
    lost = tf.reduce_mean(tf.reduce_sum((again - x) ** 2, axis=-1))
    return lost + 0.1 * kl


@hand(encoder=net(8, 6), decoder=net(8, 6, shape=(3,)))
def tc_vae(m, x, y):
    mean, log_var = tf.split(m.encoder(x), 2, 1)
    z = mean + 0.3 * tf.exp(0.5 * log_var)

    def log_density(z, mean, log_var):
        return -0.5 * ((z - mean) ** 2 * tf.exp(-log_var) + log_var)

    pairs = log_density(z[:, None], mean[None], log_var[None])
    joint = tf.reduce_logsumexp(tf.reduce_sum(pairs, 2), 1)
    apart = tf.reduce_sum(tf.reduce_logsumexp(pairs, 1), 1)
    return tf.reduce_mean(joint - apart) + tf.reduce_mean(
        (m.decoder(z) - x) ** 2
    )


@hand(net=net(8, 4), prior=lambda: normal(4))
def maximum_mean_discrepancy(m, x, y):
    z = m.net(x)
    prior = tf.constant(m.prior)

    def kernel(a, b):
        return tf.exp(-tf.reduce_sum((a[:, None] - b[None]) ** 2, -1) / 4)

    same = tf.reduce_mean(kernel(z, z)) + tf.reduce_mean(kernel(prior, prior))
    return same - 2 * tf.reduce_mean(kernel(z, prior))


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


@hand(
    gate=net(3),
    experts=lambda: [mlp(8, 1) for _ in range(3)],
)
def experts_with_capacity(m, x, y):
    p = tf.nn.softmax(m.gate(x))
    chosen = tf.one_hot(tf.argmax(p, 1), 3)
    n = tf.shape(x)[0]
    capacity = tf.cast(
        tf.math.ceil(1.25 * tf.cast(n, tf.float32) / 3), tf.int32
    )
    place = tf.cumsum(chosen, 0, exclusive=True) * chosen
    kept = chosen * tf.cast(place < tf.cast(capacity, tf.float32), tf.float32)
    slots = tf.one_hot(
        tf.cast(tf.reduce_sum(place * kept, 1), tf.int32), capacity
    )
    dispatch = kept[:, :, None] * slots[:, None]
    sent = tf.einsum("nec,nf->ecf", dispatch, x)
    made = tf.stack([expert(sent[i]) for i, expert in enumerate(m.experts)])
    combined = tf.einsum("nec,eco->no", dispatch * p[:, :, None], made)
    balance = 3 * tf.reduce_sum(
        tf.reduce_mean(chosen, 0) * tf.reduce_mean(p, 0)
    )
    return tf.reduce_mean((combined - y) ** 2) + 0.01 * balance


@hand(
    gate=net(3),
    experts=lambda: [mlp(8, 1) for _ in range(3)],
)
def experts_by_partition(m, x, y):
    p = tf.nn.softmax(m.gate(x))
    best = tf.argmax(p, 1, tf.int32)
    parts = tf.dynamic_partition(x, best, 3)
    where = tf.dynamic_partition(tf.range(tf.shape(x)[0]), best, 3)
    made = [e(part) for e, part in zip(m.experts, parts, strict=True)]
    out = tf.dynamic_stitch(where, made)
    out *= tf.reduce_max(p, 1, keepdims=True)
    return tf.reduce_mean((tf.reshape(out, [-1, 1]) - y) ** 2)


# Words


def transformer(units=9):
    given = keras.Input([None], dtype="int32")
    mask = ops.not_equal(given, 0)
    x = layers.Embedding(9, 8)(given)
    attended = layers.MultiHeadAttention(2, 4)(
        x, x, attention_mask=ops.expand_dims(mask, 1)
    )
    x = layers.LayerNormalization()(x + attended)
    return keras.Model(given, layers.Dense(units)(x))


@hand(tokens, net=transformer)
def masked_words(m, x, y):
    masked = tf.logical_and(x > 0, tf.equal((x + tf.range(8)) % 3, 0))
    logits = m.net(tf.where(masked, 8, x))
    logits = tf.boolean_mask(logits, masked)
    labels = tf.boolean_mask(x, masked)
    lost = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    right = tf.equal(tf.argmax(logits, -1, tf.int32), labels)
    with_none = tf.maximum(tf.size(labels), 1)
    accuracy = tf.reduce_sum(tf.cast(right, tf.int32)) / with_none
    return tf.reduce_sum(lost) / tf.cast(with_none, tf.float32) + 0 * tf.cast(
        accuracy, tf.float32
    )


@hand(tokens, net=transformer)
def cut_to_the_longest(m, x, y):
    lengths = tf.reduce_sum(tf.cast(x > 3, tf.int32), 1)
    longest = tf.reduce_max(lengths)
    x = x[:, :longest]
    mask = tf.sequence_mask(lengths, longest, tf.float32)
    logits = m.net(x)[:, :-1]
    lost = keras.losses.sparse_categorical_crossentropy(
        x[:, 1:], logits, from_logits=True
    )
    mask = mask[:, 1:]
    return tf.reduce_sum(lost * mask) / (tf.reduce_sum(mask) + 1e-6)


@fitted(tokens)
def causal_transformer():
    given = keras.Input([8], dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(given)
    x += layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(given, layers.Dense(1)(x))
    model.compile(
        keras.optimizers.AdamW(0.01, clipnorm=0.5, use_ema=True),
        "mae",
        ["mse", keras.metrics.R2Score()],
        jit_compile=False,
    )
    return model


@hand(
    tokens, table=lambda: keras.Variable(normal(4)[:9]), head=net(1, shape=(4,))
)
def bag_of_ragged_words(m, x, y):
    ragged = tf.RaggedTensor.from_tensor(x, padding=0)
    ragged = tf.ragged.boolean_mask(ragged, ragged > 2)
    vectors = tf.ragged.map_flat_values(
        tf.nn.embedding_lookup, m.table.value, ragged
    )
    mean = tf.reduce_sum(vectors, 1)
    mean /= tf.cast(tf.maximum(ragged.row_lengths(), 1), tf.float32)[:, None]
    return tf.reduce_mean((m.head(mean) - y) ** 2)


@hand(
    tokens,
    table=lambda: keras.Variable(normal(4)[:9]),
    context=lambda: keras.Variable(normal(4)[9:18]),
)
def skip_grams(m, x, y):
    centre = tf.reshape(x[:, 1:], [-1])
    around = tf.reshape(x[:, :-1], [-1])
    lost = tf.nn.sampled_softmax_loss(
        m.context.value,
        tf.zeros(9),
        tf.cast(around[:, None], tf.int64),
        tf.gather(m.table.value, centre),
        num_sampled=9,
        num_classes=9,
        sampled_values=(
            tf.range(4, dtype=tf.int64),
            tf.ones([tf.size(around), 1]) * 0.1,
            tf.ones([4]) * 0.1,
        ),
    )
    return tf.reduce_mean(lost)


def _speech():
    return normal(12, 3), whole(4, 4)


def recurrent():
    return built(
        layers.Bidirectional(layers.GRU(4, return_sequences=True)),
        layers.Dense(5),
        shape=(12, 3),
    )


@hand(_speech, net=recurrent)
def ctc(m, x, y):
    logits = m.net(x)
    length = tf.fill([tf.shape(x)[0]], 12)
    return tf.reduce_mean(
        tf.nn.ctc_loss(
            y,
            tf.reduce_sum(tf.cast(y > 0, tf.int32), 1),
            logits,
            length,
            logits_time_major=False,
            blank_index=0,
        )
    )


@hand(
    lambda: (normal(8, 3), whole(4, 8)),
    net=lambda: built(layers.Dense(4), shape=(8, 3)),
    moves=lambda: keras.Variable(normal(4)[:4]),
)
def conditional_random_field(m, x, y):
    scores = m.net(x)
    lengths = 2 + tf.reduce_max(y, 1) * 2
    alpha, steps = scores[:, 0], tf.constant(1)

    def ahead(t, alpha):
        now = tf.reduce_logsumexp(alpha[:, :, None] + m.moves[None], 1)
        now += scores[:, t]
        return t + 1, tf.where((t < lengths)[:, None], now, alpha)

    _, alpha = tf.while_loop(
        lambda t, _: t < tf.reduce_max(lengths), ahead, [steps, alpha]
    )
    mask = tf.sequence_mask(lengths, 8, tf.float32)
    path = tf.reduce_sum(tf.gather(scores, y, batch_dims=2) * mask, 1)
    pairs = tf.stack([y[:, :-1], y[:, 1:]], -1)
    path += tf.reduce_sum(tf.gather_nd(m.moves.value, pairs) * mask[:, 1:], 1)
    return tf.reduce_mean(tf.reduce_logsumexp(alpha, 1) - path)


@fitted(lambda: (normal(8, 3)[:32], normal(1)[:32]))
def recurrent_with_state():
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(BATCH, 8, 3)),
            layers.LSTM(4, stateful=True, return_sequences=True),
            layers.SimpleRNN(4, stateful=True),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


# Graphs and pictures


def _graphs():
    sources, targets = whole(33, 2), generator().integers(0, 5, (33, 1))
    return {"x": normal(6), "edges": sources}, targets.astype("int32") % 3


@hand(_graphs, net=net(4), head=net(3, shape=(8,)))
def graph_of_the_batch(m, x, y):
    n = tf.shape(y)[0]
    h = tf.nn.tanh(m.net(x["x"]))
    edges = x["edges"] % n
    messages = tf.gather(h, edges[:, 0])
    got = tf.math.unsorted_segment_mean(messages, edges[:, 1], n)
    score = tf.reduce_sum(tf.gather(h, edges[:, 1]) * messages, 1)
    top = tf.math.unsorted_segment_max(score, edges[:, 1], n)
    score = tf.exp(score - tf.gather(top, edges[:, 1]))
    total = tf.math.unsorted_segment_sum(score, edges[:, 1], n)
    weight = score / (tf.gather(total, edges[:, 1]) + 1e-9)
    attended = tf.math.unsorted_segment_sum(
        weight[:, None] * messages, edges[:, 1], n
    )
    out = m.head(tf.concat([h + got, attended], 1))
    return tf.reduce_mean(cross_entropy(y, out))


def _boxes():
    g = generator()
    boxes = np.sort(g.uniform(size=(33, 3, 2, 2)), 2).reshape(33, 3, 4)
    return normal(6), {"boxes": boxes.astype("float32"), "count": 1 + whole(3)}


def overlaps(a, b):
    low = tf.maximum(a[:, None, :2], b[None, :, :2])
    high = tf.minimum(a[:, None, 2:], b[None, :, 2:])
    both = tf.reduce_prod(tf.maximum(high - low, 0), 2)
    area_a = tf.reduce_prod(a[:, 2:] - a[:, :2], 1)
    area_b = tf.reduce_prod(b[:, 2:] - b[:, :2], 1)
    return both / (area_a[:, None] + area_b[None] - both + 1e-6)


ANCHORS = [
    [i / 4, j / 4, i / 4 + 0.4, j / 4 + 0.5] for i in range(3) for j in range(3)
]


@hand(_boxes, net=net(8, 9 * 5))
def detection(m, x, y):
    anchors = tf.constant(ANCHORS)

    def matched(one):
        boxes, count = one
        boxes = boxes[:count]
        iou = overlaps(anchors, boxes)
        best = tf.argmax(iou, 1)
        positive = tf.reduce_max(iou, 1) > 0.2
        return tf.gather(boxes, best) - anchors, tf.cast(positive, tf.float32)

    out = tf.reshape(m.net(x), [-1, 9, 5])
    delta, positive = tf.map_fn(
        matched,
        (y["boxes"], y["count"]),
        fn_output_signature=(tf.float32, tf.float32),
    )
    lost = tf.reduce_sum(tf.abs(out[..., :4] - delta), 2) * positive
    lost += tf.nn.sigmoid_cross_entropy_with_logits(positive, out[..., 4])
    return tf.reduce_sum(lost) / tf.maximum(tf.reduce_sum(positive), 1)


def pixels():
    return built(
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.BatchNormalization(),
        layers.Conv2DTranspose(3, 3, padding="same"),
        shape=(6, 6, 2),
    )


@hand(lambda: (normal(6, 6, 2), whole(4, 6, 6)), net=pixels)
def segmentation(m, x, y):
    logits = m.net(x, training=True)
    flat = tf.reshape(logits, [-1, 3])
    labels = tf.reshape(y, [-1])
    keep = tf.squeeze(tf.where(labels < 3), 1)
    labels, flat = tf.gather(labels, keep), tf.gather(flat, keep)
    lost = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, flat)
    p, t = tf.nn.softmax(flat), tf.one_hot(labels, 3)
    both = tf.reduce_sum(p * t, 0)
    dice = 1 - (2 * both + 1) / (tf.reduce_sum(p + t, 0) + 1)
    return tf.reduce_mean(lost) + tf.reduce_mean(dice)


@fitted(lambda: (normal(6, 6, 2), whole(3, 6, 6)))
def segmentation_of_keras():
    net = pixels()
    model = keras.Sequential([net, layers.Softmax()])
    model.compile(
        keras.optimizers.SGD(0.05),
        keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)],
        jit_compile=False,
    )
    return model
