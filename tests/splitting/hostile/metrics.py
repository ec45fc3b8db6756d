"""Metrics and logs: sums, means, and what is neither."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    count,
    errors,
    mse,
    plain,
    stepped,
)
from tests.splitting.hostile.table import (
    classes,
    couples,
    splits,
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
