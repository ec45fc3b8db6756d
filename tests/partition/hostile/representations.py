"""Representations that are learned from pairs, and metric learning."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases.table import classes, normal, whole
from tests.partition.hostile.table import (
    built,
    cross_entropy,
    down,
    hand,
    net,
    state,
    unit,
    views,
)

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
