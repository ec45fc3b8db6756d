"""Metrics that are no sums have the values of one device."""

import functools

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import fit, stacked

X, Y = m.FEATURES[:13], m.LABELS[:13]
WEIGHTS = np.linspace(0, 2, len(X)).astype("float32")


class Largest(keras.metrics.Metric):
    """The largest score; of which ``result`` returns the variable."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        if sample_weight is not None:
            y_pred *= tf.cast(sample_weight, y_pred.dtype)[:, tf.newaxis]
        largest = tf.reduce_max(y_pred)
        self.value.assign(tf.maximum(self.value, largest))

    def result(self):
        return self.value


class Deviation(keras.metrics.Metric):
    """The root of a mean, which parts join by their means."""

    def __init__(self):
        super().__init__(name="deviation")
        self.count = self.add_variable((), "zeros", name="count")
        self.mean = self.add_variable((), "zeros", name="mean")

    def update_state(self, y_true, y_pred, sample_weight=None):
        more = tf.cast(tf.size(y_pred), tf.float32)
        apart = tf.reduce_mean(y_pred**2) - self.mean
        self.count.assign_add(more)
        self.mean.assign_add(apart * more / self.count)

    def result(self):
        return tf.sqrt(self.mean)


class Parts(keras.metrics.Metric):
    """A metric that consists of others, of which one is a sum."""

    def __init__(self):
        super().__init__(name="parts")
        self.peaks = keras.metrics.Mean()
        self.hits = keras.metrics.SparseCategoricalAccuracy()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.peaks.update_state(tf.reduce_max(y_pred))
        self.hits.update_state(y_true, y_pred, sample_weight)

    def result(self):
        return {"peak": self.peaks.result(), "hit": self.hits.result()}

    def reset_state(self):
        self.peaks.reset_state()
        self.hits.reset_state()


def spread_of_scores(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_pred)))


def no_sums(**options):
    return stacked(
        lambda: [keras.layers.Dense(3)],
        metrics=lambda: [
            *(spread_of_scores, Largest(), Deviation(), Parts(), "accuracy")
        ],
        weighted_metrics=[Largest("heavy")],
        **options,
    )


# The last batch has an example for one tower only.
twice = functools.partial(fit, epochs=2, x=X, y=Y, batch_size=6)


def trained(model):
    validation = X[:6], Y[:6]
    history = twice(model, sample_weight=WEIGHTS, validation_data=validation)
    # Metrics go on from call to call.
    for _ in range(2):
        logs = model.train_on_batch(X[:6], Y[:6], return_dict=True)
    return history, logs


def test_metrics_that_are_no_sums():
    assert_exact(no_sums(), trained, kt.TowerStrategy(3), tolerance=2e-5)
