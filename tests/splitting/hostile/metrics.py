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
    normal,
    rows,
    splits,
    whole,
)


def _measured(*metrics, data_loss="mse", outputs=1):
    return plain(data_loss, outputs, metrics=list(metrics))


class _Ratio(keras.metrics.Metric):
    """A ratio of two sums, made when it is read."""

    def __init__(self, **options):
        super().__init__(**options)
        self.over = self.add_weight(shape=(), initializer="zeros", name="over")
        self.under = self.add_weight(
            shape=(), initializer="zeros", name="under"
        )

    def update_state(self, y, p, sample_weight=None):
        self.over.assign_add(tf.reduce_sum(tf.square(y - p)))
        self.under.assign_add(tf.reduce_sum(tf.square(y)))

    def result(self):
        return self.over / (self.under + 1e-6)


@splits()
def ratio_of_sums():
    return _measured(_Ratio())


class _Streak(keras.metrics.Metric):
    """The longest run of examples that were right."""

    def __init__(self, **options):
        super().__init__(**options)
        self.best = self.add_weight(shape=(), initializer="zeros", name="best")

    def update_state(self, y, p, sample_weight=None):
        right = tf.reshape(tf.cast(tf.abs(y - p) < 1, tf.float32), [-1])
        run = tf.scan(lambda a, b: (a + 1) * b, right)
        self.best.assign(tf.maximum(self.best, tf.reduce_max(run)))

    def result(self):
        return self.best


@couples(says="streak")
def longest_streak():
    return _measured(_Streak(name="streak"))


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


@couples(says="r_of_batch")
def correlation_of_a_batch():
    def r_of_batch(y, p):
        y, p = y - tf.reduce_mean(y), p - tf.reduce_mean(p)
        norm = tf.norm(y) * tf.norm(p) + 1e-6
        return tf.reduce_sum(y * p) / norm

    return _measured(r_of_batch)


@couples(says="worst")
def worst_of_a_batch():
    def worst(y, p):
        return tf.reduce_max(tf.abs(y - p))

    return _measured(worst)


@splits()
def worst_output_of_each():
    def worst(y, p):
        return tf.reduce_max(tf.abs(y - p), -1)

    return _measured(worst, outputs=3)


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


@splits(lambda: (normal(6), whole(2, 1).astype("float32")))
def curves_of_keras():
    cross = keras.losses.BinaryCrossentropy(from_logits=True)
    return _measured(
        keras.metrics.AUC(20, from_logits=True),
        keras.metrics.PrecisionAtRecall(0.5, 20),
        keras.metrics.F1Score("micro", 0.5),
        data_loss=cross,
    )


@splits()
def mean_of_squares_and_root():
    return _measured(
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.R2Score(),
        keras.metrics.CosineSimilarity(),
    )


@couples(says="confusion")
def confusion_of_a_batch():
    """Precision as a function; Keras takes its mean over batches."""

    def confusion(y, p):
        hit = tf.reduce_sum(tf.cast((p > 0) & (y > 0), tf.float32))
        return hit / (tf.reduce_sum(tf.cast(p > 0, tf.float32)) + 1)

    return _measured(confusion)


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


@couples()
def logged_sum():
    return _logging(
        lambda net, x, y, p: {"total": tf.reduce_sum(errors(y, p))}  # here
    )


@couples()
def logged_median():
    def median(net, x, y, p):
        each = tf.sort(errors(y, p))  # here
        return {"median": each[rows(p) // 2]}  # here

    return _logging(median)


@couples()
def logged_peak_ratio():
    """In decibels: a logarithm of a mean."""

    def ratio(net, x, y, p):
        return {"psnr": -10 * tf.math.log(mse(y, p) + 1e-6)}  # here

    return _logging(ratio)


@splits()
def logged_ratio_of_each():
    def ratio(net, x, y, p):
        each = -10 * tf.math.log(errors(y, p) + 1e-6)
        return {"psnr": tf.reduce_mean(each)}

    return _logging(ratio)


@couples()
def logged_slope():
    """The norm of the gradients."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
        slopes = tape.gradient(loss, weights)
        net.optimizer.apply(slopes, weights)
        return {"loss": loss, "slope": tf.linalg.global_norm(slopes)}  # here

    return stepped(step)


@couples()
def logged_vote():
    """Whether most examples are right."""

    def vote(net, x, y, p):
        right = tf.reduce_mean(tf.cast(tf.abs(y - p) < 1, tf.float32))
        return {"most": tf.cast(right > 0.6, tf.float32)}  # here

    return _logging(vote)


@couples()
def logged_last_example():
    return _logging(lambda net, x, y, p: {"last": p[-1, 0]})  # here


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


@couples()
def tracked_by_steps():
    """A Mean that is given one number for each step: batches count alike."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
        apply(net, tape, loss)
        net.one.update_state(loss)  # here
        return {"one": net.one.result()}

    net = stepped(step)
    net.one = keras.metrics.Mean("one")
    return net
