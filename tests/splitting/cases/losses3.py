"""Losses written with the rules of the analysis in mind, and of papers."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    classes,
    differs,
    numbers,
    plain,
    proven,
    unproven,
)


def count(t):
    return tf.cast(tf.shape(t)[0], tf.float32)


def errors(y, p):
    return tf.reduce_mean(tf.square(p - y), -1)


def positives(y):
    return tf.reduce_sum(tf.cast(y > 0, tf.int32))


@differs()
def power_by_loop():
    def loss(y, p):
        _, factor = tf.while_loop(
            lambda i, _: i < tf.shape(p)[0],  # here
            lambda i, f: (i + 1, 0.9 * f),
            (0, 1.0),
        )
        return errors(y, p) * factor  # here

    return plain(loss)


@differs()
def louder_for_five():
    def loss(y, p):
        e = errors(y, p)
        return tf.cond(
            tf.equal(tf.shape(p)[0], 5),  # here
            lambda: 3.0 * e,  # here
            lambda: e,
        )

    return plain(loss)


@differs()
def factor_from_a_table():
    def loss(y, p):
        table = tf.linspace(0.1, 1.0, 20)
        return errors(y, p) * table[tf.shape(p)[0]]  # here

    return plain(loss)


@differs()
def sliced_from_a_table():
    def loss(y, p):
        table = tf.linspace(0.1, 1.0, 20)
        part = tf.slice(table, [tf.shape(p)[0]], [2])  # here
        return errors(y, p) * tf.reduce_sum(part)

    return plain(loss)


@differs()
def diagonal_of_sum():
    def loss(y, p):
        c = tf.matmul(p, p, transpose_a=True)
        c = tf.linalg.set_diag(c, tf.ones([3]))  # here
        return tf.reduce_sum(c) / count(p)

    return plain(loss)


@differs()
def split_by_positives():
    def loss(y, p):
        k = tf.minimum(positives(y), 5)  # here
        a, _ = tf.split(tf.linspace(0.1, 1.0, 6), [k, 6 - k])  # here
        return errors(y, p) * tf.reduce_sum(a)

    return plain(loss)


@differs()
def divided_by_positives():
    def loss(y, p):
        a, _ = tf.split(
            tf.linspace(0.1, 1.0, 60),
            tf.stack([positives(y), 60 - positives(y)]),  # here
        )
        return errors(y, p) * tf.reduce_sum(a)  # here

    return plain(loss)


@differs()
def reshaped_by_positives():
    def loss(y, p):
        k = positives(y)
        w = tf.reshape(tf.linspace(0.1, 1.0, 5040), [-1, k])  # here
        return errors(y, p) * tf.reduce_sum(w[0])  # here

    return plain(loss)


@differs()
def element_by_positives():
    def loss(y, p):
        factors = tf.TensorArray(tf.float32, 20, clear_after_read=False)
        factors = factors.unstack(tf.linspace(0.1, 1.0, 20))
        return errors(y, p) * factors.read(positives(y))  # here

    return plain(loss)


@differs()
def powers_of_nothing():
    def loss(y, p):
        n = count(p)
        one = tf.pow(tf.zeros_like(p), 0.0) / n
        return tf.reduce_mean(tf.square(p - y)) + tf.reduce_mean(one)

    return plain(loss)


@differs()
def products_of_nothing():
    def loss(y, p):
        one = tf.math.cumprod(tf.zeros_like(p), 1, exclusive=True)
        return tf.reduce_mean(tf.square(p - y)) + tf.reduce_mean(one) * count(p)

    return plain(loss)


@proven()
def last_block():
    def loss(y, p):
        both = tf.concat([p, tf.square(p - y)], 0)
        return tf.reduce_mean(both[-tf.shape(p)[0] :])

    return plain(loss)


@differs()
def mean_of_integers():
    def loss(y, p):
        m = tf.reduce_mean(tf.cast(10 * y, tf.int32))  # here
        return errors(y, p) * tf.cast(m, tf.float32)

    return plain(loss)


@differs()
def half_of_positives():
    def loss(y, p):
        k = positives(y) // 2  # here
        return tf.reduce_mean(errors(y, p)) + tf.cast(k, tf.float32) / count(p)

    return plain(loss)


@differs()
def cut_out_of_the_first():
    def loss(y, p):
        image = tf.reshape(p, [-1, 3, 1, 1])
        part = tf.image.crop_and_resize(  # here
            image,
            [[0.0, 0.0, 1.0, 1.0]],
            [0],
            [2, 2],  # here
        )
        return errors(y, p) + tf.reduce_mean(part)

    return plain(loss)


@unproven()
def gathered_in_rows():
    def loss(y, p):
        at = tf.argmax(p, 1)
        return tf.gather(tf.square(p - y), at, batch_dims=1)

    return plain(loss)


@unproven()
def recomputed():
    @tf.recompute_grad
    def activation(p):
        return tf.nn.tanh(p) * tf.nn.sigmoid(p)

    return plain(lambda y, p: tf.square(activation(p) - y))


@proven(classes)
def large_margin():
    def loss(y, p):
        y = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)
        c = tf.clip_by_value(tf.nn.l2_normalize(p, -1), -0.99, 0.99)
        moved = tf.cos(tf.acos(c) + 0.2)
        logits = 8 * tf.where(y > 0, moved, c)
        return tf.nn.softmax_cross_entropy_with_logits(y, logits)

    return plain(loss)


@differs(classes)
def batch_hard_triplets():
    def loss(y, p):
        y = tf.reshape(y, [-1])
        d = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)  # here
        alike = tf.equal(y[:, None], y[None])  # here
        far = tf.reduce_max(tf.where(alike, d, 0.0), 1)
        near = tf.reduce_min(tf.where(alike, 1e9, d), 1)
        return tf.nn.relu(1 + far - near)

    return plain(loss)


@differs(classes)
def supervised_contrastive():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1, 1]), tf.float32)
        alike = tf.cast(tf.equal(y, tf.transpose(y)), tf.float32)  # here
        z = tf.nn.l2_normalize(p, -1)
        s = tf.nn.log_softmax(z @ tf.transpose(z) / 0.3)  # here
        return -tf.reduce_sum(alike * s, 1) / tf.reduce_sum(alike, 1)

    return plain(loss)


@differs()
def variance_invariance_covariance():
    def loss(y, p):
        c = p - tf.reduce_mean(p, 0)  # here
        spread = tf.sqrt(tf.reduce_mean(tf.square(c), 0) + 1e-4)
        return tf.reduce_mean(tf.nn.relu(1 - spread)) + errors(y, p)

    return plain(loss)


@proven()
def alike_pairs():
    """Two views of one example, as in SimSiam."""

    def loss(y, p):
        a = tf.nn.l2_normalize(p, -1)
        b = tf.nn.l2_normalize(tf.stop_gradient(p + y), -1)
        return -tf.reduce_sum(a * b, -1)

    return plain(loss)


@differs()
def sinkhorn():
    def loss(y, p):
        q = tf.exp(tf.stop_gradient(p))
        for _ in range(2):
            q /= tf.reduce_sum(q, 0, keepdims=True)  # here
            q /= tf.reduce_sum(q, 1, keepdims=True)
        return -tf.reduce_sum(q * tf.nn.log_softmax(p), -1)

    return plain(loss)


@differs(classes)
def worst_group():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        hot = tf.one_hot(y, 3)
        each = tf.reduce_sum(hot * e[:, None], 0)
        each /= tf.reduce_sum(hot, 0) + 1.0  # here
        return tf.reduce_max(each)

    return plain(loss)


@differs()
def invariant_risk():
    def loss(y, p):
        scale = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(scale)
            e = tf.reduce_mean(tf.square(scale * p - y))
        return e + tf.square(tape.gradient(e, scale))  # here

    return plain(loss)


@proven()
def kept_if_hard():
    def loss(y, p):
        e = errors(y, p)
        return tf.where(tf.stop_gradient(e) > 0.5, e, tf.zeros_like(e))

    return plain(loss)


@differs()
def mean_of_the_hard():
    def loss(y, p):
        e = errors(y, p)
        hard = tf.cast(e > 0.5, tf.float32)
        return tf.reduce_sum(e * hard) / tf.reduce_sum(hard)  # here

    return plain(loss)


@differs()
def mean_of_the_hard_without_nan():
    def loss(y, p):
        e = errors(y, p)
        hard = tf.cast(e > 0.5, tf.float32)
        return tf.math.divide_no_nan(  # here
            tf.reduce_sum(e * hard), tf.reduce_sum(hard)
        )

    return plain(loss)


@differs()
def above_median():
    def loss(y, p):
        e = errors(y, p)
        middle = tf.sort(e)[tf.shape(e)[0] // 2]  # here
        return tf.where(e > middle, e, 0.5 * e)

    return plain(loss)


@differs()
def quantile_of_keras():
    def loss(y, p):
        e = errors(y, p)
        return keras.ops.minimum(e, keras.ops.quantile(e, 0.5))  # here

    return plain(loss)


@unproven(classes)
def average_of_tensorflow():
    def loss(y, p):
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(tf.reshape(y, [-1]), tf.int32), p
        )
        return tf.nn.compute_average_loss(e)

    return plain(loss)


@unproven()
def sparse_product():
    def loss(y, p):
        q = tf.sparse.from_dense(tf.where(p > 0, p, 0.0))
        return tf.square(tf.sparse.sparse_dense_matmul(q, tf.eye(3)) - y)

    return plain(loss)


@unproven()
def ragged_means():
    def loss(y, p):
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        q = tf.RaggedTensor.from_tensor(p, lengths)
        return tf.square(tf.reduce_mean(q, 1) - y[:, 0])

    return plain(loss)


@differs()
def ragged_mean_of_all():
    def loss(y, p):
        lengths = tf.cast(y[:, 0] > 0, tf.int32) + 1
        q = tf.RaggedTensor.from_tensor(tf.square(p), lengths)  # here
        return tf.reduce_mean(q.flat_values)

    return plain(loss)


@differs()
def by_numpy():
    def loss(y, p):
        def largest(a):
            return np.float32(a.max())

        top = tf.numpy_function(largest, [p], tf.float32)  # here
        return errors(y, p) * tf.ensure_shape(top, [])

    return plain(loss)


@proven()
def forecast():
    """A moving average over the features of each example."""

    def loss(y, p):
        q = tf.scan(lambda a, b: 0.5 * a + b, tf.transpose(p))
        return tf.square(tf.transpose(q) - y)

    return plain(loss)


@differs(binary)
def area_under_curve():
    def loss(y, p):
        up = tf.boolean_mask(p, y > 0)  # here
        down = tf.boolean_mask(p, y < 1)  # here
        return tf.reduce_mean(tf.nn.sigmoid(down[:, None] - up[None]))

    return plain(loss)


@differs(binary)
def f1_by_sums():
    def loss(y, p):
        p = tf.sigmoid(p)
        both = tf.reduce_sum(p * y, 0)
        each = tf.reduce_sum(p + y, 0)
        return 1 - tf.reduce_mean(tf.math.divide_no_nan(2 * both, each))  # here

    return plain(loss)


@proven(binary)
def jaccard_of_each():
    def loss(y, p):
        p = tf.sigmoid(p)
        both = tf.reduce_sum(p * y, -1)
        return 1 - both / (tf.reduce_sum(p + y, -1) - both + 1.0)

    return plain(loss)


@differs(classes)
def positive_weight_of_batch():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1, 1]) == 1, tf.float32)
        w = (count(y) - tf.reduce_sum(y)) / tf.reduce_sum(y)  # here
        return tf.nn.weighted_cross_entropy_with_logits(y, p[:, :1], w)  # here

    return plain(loss)


@differs()
def explained_variance():
    def loss(y, p):
        rest = tf.reduce_mean(tf.square(p - y))
        whole = tf.reduce_mean(tf.square(y)) + 0.1
        return rest / whole  # here

    return plain(loss)


@differs()
def histogram_by_hand():
    def loss(y, p):
        at = tf.linspace(-1.0, 1.0, 5)
        near = tf.exp(-tf.square(p[:, :1] - at))
        h = tf.reduce_mean(near, 0)
        return tf.reduce_sum(tf.square(h - 0.2))  # here

    return plain(loss)


@differs()
def deviation_from_constant_size():
    def loss(y, p):
        m = tf.reduce_sum(p, 0) / 16.0
        return tf.reduce_sum(tf.square(m)) + errors(y, p)  # here

    return plain(loss)


@proven()
def in_double():
    def loss(y, p):
        p, y = tf.cast(p, tf.float64), tf.cast(y, tf.float64)
        return tf.cast(tf.reduce_mean(tf.math.log(tf.cosh(p - y))), tf.float32)

    return plain(loss)


def weighted():
    x, y = numbers()
    w = np.random.default_rng(4).uniform(size=len(x)).astype("float32")
    return x, y, w


@proven(weighted)
def weights_of_fit():
    return plain("mse", 1, weighted_metrics=["mae"])


@proven(weighted)
def weights_normalized():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return plain(loss, 1)


@proven()
def metrics_of_keras():
    return plain(
        "mse",
        1,
        metrics=[
            keras.metrics.RootMeanSquaredError(),
            keras.metrics.R2Score(),
            keras.metrics.CosineSimilarity(),
            keras.metrics.MeanAbsolutePercentageError(),
        ],
    )


@proven(binary)
def metrics_of_classes():
    return plain(
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.AUC(from_logits=True, multi_label=True),
            keras.metrics.Precision(),
            keras.metrics.F1Score(),
            keras.metrics.BinaryIoU(),
            keras.metrics.RecallAtPrecision(0.5),
            keras.metrics.TopKCategoricalAccuracy(2),
        ],
    )


@differs()
def metric_by_function():
    def largest(y, p):
        return tf.reduce_max(tf.abs(y - p))  # here

    return plain("mse", 1, metrics=[largest])


@differs()
def metric_of_moving_mean():
    class Moving(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.kept = self.add_variable((), "zeros", name="kept")

        def update_state(self, y, p, sample_weight=None):
            e = tf.reduce_mean(tf.square(y - p))
            self.kept.assign(0.9 * self.kept + 0.1 * e)  # here

        def result(self):
            return self.kept * 1.0

    return plain("mse", 1, metrics=[Moving()])
