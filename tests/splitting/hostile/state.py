"""What layers, metrics, callbacks and constraints keep from step to step."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    count,
    errors,
    mse,
    plain,
    stepped,
    with_layers,
    with_variable,
)
from tests.splitting.hostile.table import (
    by_design,
    classes,
    couples,
    dense,
    rows,
    splits,
)

WIDTH = 6


@couples()
def last_example_is_kept():
    def step(net, x, y):
        net.kept.assign(x[-1])  # here
        return by_default(net, x - net.kept, y)

    return with_variable(step, (WIDTH,))


@couples()
def table_of_the_examples():
    """An embedding of each example is kept under its number."""

    def step(net, x, y):
        place = tf.cast(tf.abs(x[:, 0]) * 10, tf.int32) % 5
        net.kept.assign(
            tf.tensor_scatter_nd_update(  # here
                net.kept, place[:, None], tf.reduce_mean(x, 1)
            )
        )
        return by_default(net, x, y)

    return with_variable(step, (5,))


@couples()
def loss_against_the_last_one():
    """Stops learning once the loss has grown."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
            scaled = loss * tf.cast(loss < net.kept, tf.float32)  # here
        net.kept.assign(loss)
        return apply(net, tape, scaled)

    return with_variable(step, (), 100.0)


class _Spectral(keras.layers.Layer):
    """A dense layer whose weight is divided by its largest singular value."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4), name="w")
        self.u = self.add_weight(shape=(1, 4), trainable=False, name="u")

    def call(self, x, training=False):
        v = tf.math.l2_normalize(self.u @ tf.transpose(self.w))
        u = tf.math.l2_normalize(v @ self.w)
        sigma = tf.reduce_sum(v @ self.w @ tf.transpose(u))
        if training:
            self.u.assign(tf.stop_gradient(u))
        return x @ (self.w / sigma)


@splits()
def spectral_by_hand():
    return with_layers(_Spectral())


@splits()
def spectral_of_keras():
    return with_layers(keras.layers.SpectralNormalization(dense(4)))


@by_design()
def renormalized_batch():
    return with_layers(dense(4), keras.layers.BatchNormalization(), dense(3))


class _Ghost(keras.layers.Layer):
    """TabNet's ghost normalization: over pieces of a fixed size."""

    def call(self, x):
        def each(part):
            mean, variance = tf.nn.moments(part, [0])  # here
            return (part - mean) * tf.math.rsqrt(variance + 0.1)  # here

        half = rows(x) // 2
        return tf.concat([each(x[:half]), each(x[half:])], 0)  # here


@couples()
def normalized_by_ghosts():
    return with_layers(dense(4), _Ghost())


@splits()
def normalized_by_groups():
    return with_layers(
        dense(4),
        keras.layers.GroupNormalization(2),
        keras.layers.UnitNormalization(),
    )


def _measured(*metrics, data_loss="mse", outputs=1):
    return plain(data_loss, outputs, metrics=list(metrics))


class _Smooth(keras.metrics.Metric):
    """A moving average of the batches' losses."""

    def __init__(self, **options):
        super().__init__(**options)
        self.value = self.add_weight(
            shape=(), initializer="zeros", name="value"
        )

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(0.7 * self.value + 0.3 * mse(y, p))

    def result(self):
        return self.value


@couples(says="smooth")
def moving_average_of_the_loss():
    return _measured(_Smooth(name="smooth"))


class _Last(keras.metrics.Metric):
    """Keeps its value in Python."""

    def __init__(self, **options):
        super().__init__(**options)
        self.total = self.add_weight(
            shape=(), initializer="zeros", name="total"
        )
        self.seen = self.add_weight(
            shape=(), initializer="zeros", name="seen", dtype="int32"
        )

    def update_state(self, y, p, sample_weight=None):
        first = tf.cast(self.seen == 0, tf.float32)
        self.total.assign_add(mse(y, p) * (1 + first))
        self.seen.assign_add(1)

    def result(self):
        return self.total / tf.cast(tf.maximum(self.seen, 1), tf.float32)


@couples(says="batches")
def mean_of_batches():
    """Each batch counts alike, however large it is, and the first one twice."""
    return _measured(_Last(name="batches"))


class _Correlation(keras.metrics.Metric):
    """Pearson's correlation from five sums."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sums = self.add_weight(
            shape=(6,), initializer="zeros", name="sums"
        )

    def update_state(self, y, p, sample_weight=None):
        of = [y, p, y * y, p * p, y * p, tf.ones_like(y)]
        self.sums.assign_add(tf.stack([tf.reduce_sum(t) for t in of]))

    def result(self):
        y, p, yy, pp, yp, n = tf.unstack(self.sums / (self.sums[5] + 1e-6))
        cross = yp - y * p
        return cross / tf.sqrt((yy - y * y) * (pp - p * p) + 1e-6) + 0 * n


@splits()
def correlation_of_sums():
    return _measured(_Correlation())


@couples(says="worst")
def worst_of_a_batch():
    def worst(y, p):
        return tf.reduce_max(tf.abs(y - p))

    return _measured(worst)


@splits(classes)
def metrics_of_keras():
    cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _measured(
        "accuracy",
        keras.metrics.SparseTopKCategoricalAccuracy(2),
        keras.metrics.MeanIoU(3, sparse_y_pred=False),
        data_loss=cross,
        outputs=3,
    )


def _logging(logs_of):
    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            loss = mse(y, p)
        return apply(net, tape, loss) | logs_of(net, x, y, p)

    return stepped(step)


@splits()
def logged_means():
    return _logging(
        lambda net, x, y, p: {
            "absolute": tf.reduce_mean(tf.abs(y - p)),
            "share": count(tf.boolean_mask(p, p[:, 0] > 0)) / count(p),
            "weights": tf.linalg.global_norm(net.trainable_variables),
        }
    )


@splits()
def logged_through_trackers():
    """A Mean that is given rows, and one that is given means and counts."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            loss = mse(y, p)
        apply(net, tape, loss)
        net.one.update_state(errors(y, p))
        net.two.update_state(loss, sample_weight=count(y))
        return {"one": net.one.result(), "two": net.two.result()}

    net = stepped(step)
    net.one, net.two = keras.metrics.Mean("one"), keras.metrics.Mean("two")
    return net
