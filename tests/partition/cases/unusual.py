"""Steps that are unlike others: effects, autograph, forward mode, beams."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases.by_hand import (
    built,
    cross_entropy,
    down,
    fitted,
    hand,
    mlp,
    net,
    state,
)
from tests.partition.cases.table import classes, images, normal, numbers


@hand(net=net(8, 1))
def pairs_above_the_diagonal(m, x, y):
    p = m.net(x)
    n = tf.shape(x)[0]
    above = tf.linalg.band_part(tf.ones([n, n]), 0, -1) - tf.eye(n)
    gap = tf.boolean_mask(p - tf.transpose(p), above > 0)
    wanted = tf.cast(y > tf.transpose(y), tf.float32)
    wanted = tf.boolean_mask(wanted, above > 0)
    lost = tf.nn.sigmoid_cross_entropy_with_logits(wanted, gap)
    return tf.math.divide_no_nan(
        tf.reduce_sum(lost), tf.cast(tf.size(lost), tf.float32)
    ) + tf.reduce_mean(p**2)


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda g: -0.3 * g


@tf.custom_gradient
def normalized_gradient(x):
    def back(g):
        return g / (tf.norm(g) + 1e-6)

    return x + 0, back


@hand(
    classes,
    net=net(8, 4),
    label=net(3, shape=(4,)),
    domain=net(1, shape=(4,)),
)
def domain_adversaries(m, x, y):
    z = m.net(x)
    half = tf.cast(tf.range(tf.shape(x)[0]) < tf.shape(x)[0] // 2, tf.float32)
    domain = m.domain(reversed_gradient(z))[:, 0]
    lost = tf.nn.sigmoid_cross_entropy_with_logits(half, domain)
    ours = cross_entropy(y, m.label(normalized_gradient(z)))
    return tf.reduce_mean(lost) + tf.reduce_mean(ours)


@hand(
    images,
    head=net(1, shape=(8,)),
    shift=net(4, shape=(8,)),
)
def regions(m, x, y):
    pooled = tf.reshape(tf.image.resize(x, [2, 2]), [-1, 8])
    boxes = tf.sigmoid(m.shift(pooled))
    low = tf.minimum(boxes[:, :2], boxes[:, 2:])
    boxes = tf.concat([low, low + 0.4], 1)
    n = tf.shape(x)[0]
    seen = tf.image.crop_and_resize(x, boxes, tf.range(n), [2, 2])
    p = m.head(tf.reshape(seen, [n, -1]))
    flat = tf.reshape(tf.transpose(x, [0, 3, 1, 2]), [n * 2, 6, 6])
    patches = tf.image.extract_patches(
        flat[..., None], [1, 3, 3, 1], [1, 3, 3, 1], [1, 1, 1, 1], "VALID"
    )
    level = tf.reduce_mean(tf.reshape(patches, [n, -1]), 1, keepdims=True)
    return tf.reduce_mean((p - y - level) ** 2)


@fitted(lambda: (normal(6, 3), normal(1)))
def written_by_keras_operations():
    class Mixed(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(3, 3))

        def compute_output_shape(self, shape):
            return shape[0], 6

        def call(self, x):
            h = ops.matmul(x, self.w)
            _, states = ops.scan(
                lambda c, v: (0.5 * c + v, ops.tanh(c)),
                ops.zeros_like(h[:, 0]),
                ops.swapaxes(h, 0, 1),
            )
            h = ops.swapaxes(states, 0, 1)
            h = ops.cumsum(h, axis=1)
            h += ops.vectorized_map(lambda v: v - ops.max(v), h)
            norm = ops.fori_loop(
                0, 3, lambda i, v: v / (ops.norm(v) + 1), ops.mean(h, 1)
            )
            ids = ops.argmax(norm, -1)
            groups = ops.segment_sum(norm, ids, 3)
            return ops.concatenate(
                [ops.mean(h, 1), norm - ops.take(groups, ids, 0)], -1
            )

    model = built(Mixed(), layers.Dense(1), shape=(6, 3))
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


class Reported(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = mlp(8, 1)
        self.kept = {
            "auc": keras.metrics.AUC(num_thresholds=7),
            "recall": keras.metrics.RecallAtPrecision(0.5, 7),
            "corr": keras.metrics.PearsonCorrelation(),
            "cos": keras.metrics.CosineSimilarity(),
            "iou": keras.metrics.BinaryIoU(),
        }

    def call(self, x, training=None):
        return self.net(x)

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p, weight)
            loss = self.optimizer.scale_loss(loss)
        down(self, tape, loss)
        label = tf.cast(y > tf.reduce_mean(y), tf.float32)
        guess = tf.sigmoid(p)
        for name in ("auc", "recall", "iou"):
            self.kept[name].update_state(label, guess, weight)
        self.kept["corr"].update_state(y, p)
        self.kept["cos"].update_state(y, p, sample_weight=weight)
        logs = self.compute_metrics(x, y, p, weight)
        return logs | {k: v.result() for k, v in self.kept.items()}


@fitted(lambda: (*numbers(), np.abs(normal())))
def reported_by_hand():
    model = Reported()
    model.compile(
        keras.optimizers.SGD(0.05), "mse", metrics=["mae"], jit_compile=False
    )
    return model


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
