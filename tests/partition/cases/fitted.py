"""Keras's own step with much around it, and steps with teachers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases.by_hand import (
    BATCH,
    built,
    cross_entropy,
    down,
    fitted,
    hand,
    net,
    views,
)
from tests.partition.cases.table import classes, normal, whole


def _named():
    x = {"numbers": normal(6), "words": whole(9, 8), "picture": normal(6, 6, 2)}
    y = {"value": normal(1), "class": whole(3, 1), "tags": whole(2, 3)}
    return {"x": x, "y": y, "sample_weight": {k: np.abs(normal()) for k in y}}


@fitted(_named)
def many_inputs_and_outputs():
    a = keras.Input([6], name="numbers")
    b = keras.Input([8], dtype="int32", name="words")
    c = keras.Input([6, 6, 2], name="picture")
    words = layers.GRU(3)(layers.Embedding(9, 3, mask_zero=True)(b))
    seen = layers.GlobalMaxPooling2D()(
        layers.SeparableConv2D(3, 3, use_bias=False)(c)
    )
    h = layers.Concatenate()([layers.Dense(4, use_bias=False)(a), seen])
    h = layers.Concatenate()([layers.BatchNormalization()(h), words])
    outputs = {
        "value": layers.Dense(1)(h),
        "class": layers.Dense(3, "softmax")(h),
        "tags": layers.Dense(3, "sigmoid")(h),
    }
    model = keras.Model([a, b, c], outputs)
    model.compile(
        keras.optimizers.SGD(0.05, 0.9, True, global_clipnorm=0.7),
        {
            "value": keras.losses.LogCosh(),
            "class": "sparse_categorical_crossentropy",
            "tags": keras.losses.BinaryFocalCrossentropy(label_smoothing=0.1),
        },
        metrics={
            "value": ["mae", keras.metrics.RootMeanSquaredError()],
            "class": keras.metrics.SparseTopKCategoricalAccuracy(2),
            "tags": [keras.metrics.AUC(multi_label=True), "accuracy"],
        },
        loss_weights={"value": 0.5, "class": 1.0, "tags": 0.2},
        weighted_metrics={
            "tags": [keras.metrics.Precision(), keras.metrics.F1Score("micro")]
        },
        jit_compile=False,
    )
    return model


def _counts():
    return normal(6)[:32], np.abs(normal(1)[:32])


@fitted(_counts)
def batch_that_is_static():
    given = keras.Input(batch_shape=(BATCH, 6))
    h = layers.Dense(4)(given)
    h = ops.reshape(h, [BATCH, 2, 2])
    h = h - ops.mean(ops.reshape(h, [BATCH * 2, 2]), 0)
    h = ops.reshape(ops.transpose(h, [1, 0, 2]), [2 * BATCH, 2])
    h = ops.transpose(ops.reshape(h, [2, BATCH, 2]), [1, 0, 2])
    model = keras.Model(given, layers.Dense(1)(ops.reshape(h, [BATCH, 4])))
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


@fitted()
def added_by_layers():
    class Decorrelated(layers.Layer):
        def __init__(self):
            super().__init__()
            self.kept = keras.metrics.Mean("off")
            self.seen = self.add_weight(shape=(4, 4), trainable=False)

        def call(self, x, training=False):
            n = ops.cast(ops.shape(x)[0], x.dtype)
            c = ops.matmul(ops.transpose(x - ops.mean(x, 0)), x) / n
            if training:
                self.seen.assign(0.9 * self.seen + 0.1 * c)
                self.kept.update_state(c)
            self.add_loss(0.1 * ops.sum(ops.square(ops.triu(c, 1))))
            return x - ops.matmul(x, self.seen) * 0.1

    model = built(layers.Dense(4, "tanh"), Decorrelated(), layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


@hand(classes, net=net(8, 3), teacher=net(8, 3))
def mean_teacher_with_pseudo_labels(m, x, y):
    m.teacher.trainable = False
    weak, strong = views(x)
    p = tf.nn.softmax(m.teacher(weak))
    sure = tf.reduce_max(p, 1) > 0.4
    labelled = tf.shape(x)[0] // 2
    with tf.GradientTape() as tape:
        known = cross_entropy(y[:labelled], m.net(x[:labelled]))
        guessed = cross_entropy(tf.argmax(p, 1), m.net(strong))
        mask = tf.cast(sure, tf.float32)
        loss = tf.reduce_sum(known) / (tf.cast(labelled, tf.float32) + 1)
        loss += tf.reduce_mean(guessed * mask)
    down(m, tape, loss)
    step = tf.cast(m.optimizer.iterations, tf.float32)
    decay = tf.minimum(0.99, (1 + step) / (10 + step))
    for slow, fast in zip(m.teacher.weights, m.net.weights, strict=True):
        slow.assign(decay * slow + (1 - decay) * fast)
    return {"loss": loss, "sure": tf.reduce_mean(mask)}


@hand(net=net(8, 1))
def learned_by_an_inner_step(m, x, y):
    """Adapt to half of the batch; be judged by the other half."""
    half = (tf.shape(x)[0] + 1) // 2
    w, b = m.net.layers[0].weights
    v, c = m.net.layers[1].weights

    def lost(w, b, v, c, x, y):
        return tf.reduce_mean((tf.tanh(x @ w + b) @ v + c - y) ** 2)

    fast = [one.value for one in (w, b, v, c)]
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(fast)
            loss = lost(*fast, x[:half], y[:half])
        gradients = tape.gradient(loss, fast)
        fast = [f - 0.1 * g for f, g in zip(fast, gradients, strict=True)]
    return lost(*fast, x[half - 1 :], y[half - 1 :])
