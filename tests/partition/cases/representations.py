"""Representations that are learned from pairs, and metric learning."""

import keras
import tensorflow as tf
from keras import layers

from tests.partition.cases.by_hand import built, hand, net, state, unit, views
from tests.partition.cases.table import classes, normal, whole


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
