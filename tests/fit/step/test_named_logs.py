"""Logs are results of metrics by what they are, not by their names."""

import keras
import tensorflow as tf

import keras_towers as kt
from tests.fit.step.written import Stepping, made
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y


class Reporting(Stepping):
    """Reports results under other names, nested, and of hidden metrics."""

    def prepare(self):
        self.hits = keras.metrics.TruePositives(name="hits")
        self.mean = keras.metrics.Mean(name="mean")
        self.unused = keras.metrics.Mean(name="counts_nothing")
        self.__dict__["hidden"] = [keras.metrics.FalsePositives()]

    @property
    def metrics(self):
        return [self.mean, self.unused]

    def after(self, x, p):
        y = tf.cast(x[:, 0] > 0, tf.float32)
        score = tf.sigmoid(x[:, 1])
        self.hits.update_state(y, score)
        self.__dict__["hidden"][0].update_state(y, score)
        self.mean.update_state(score)

    def train_step(self, data):
        logs = super().train_step(data)
        return {
            "loss": logs["mine"],
            "found": self.hits.result(),
            "parts": {
                "wrong": self.__dict__["hidden"][0].result(),
                "average": self.mean.result(),
            },
            # Values of the step, and no results of the metrics of that name.
            "mean": tf.reduce_mean(data[0][:, 2]),
            "counts_nothing": logs["mine"],
        }


def trained(model):
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    history = model.fit(
        X, Y, batch_size=12, shuffle=False, verbose=0, callbacks=[note]
    ).history
    return history, seen


def test_exact():
    make = made(Reporting)
    assert_exact(make, trained, kt.TowerStrategy(3), tolerance=5e-6)
