"""Warnings of what a step does that towers may not do as one device."""

import keras
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import written
from tests.fit.step.acts import Stepping
from tests.kit.training import X, Y


class Queueing(Stepping):
    """Keeps the last features, as NNCLR does."""

    rows = staticmethod(tf.identity)

    def prepare(self):
        super().prepare()
        self.queue = written.zeros(self, (4, 6), name="queue")

    def after(self, x, p):
        super().after(x, p)
        self.queue.assign(tf.concat([self.rows(x), self.queue], 0)[:4])


class Alike(Queueing, written.ClippingSometimes, written.Writing):
    """Writes what is the same on all towers, or can be averaged."""

    rows = staticmethod(kt.gather)


class Reporting(Stepping):
    """Logs what is no mean over examples."""

    def prepare(self):
        self.mean = keras.metrics.Mean()

    def train_step(self, data):
        logs = super().train_step(data)
        mean = keras.ops.exp(self.mean.result())
        rows = tf.shape(data[0])[0]
        return {**logs, "rows": rows, "vector": data[0][0], "derived": mean}


def warnings(kind, logged):
    model = written.made(kind)()
    with kt.TowerStrategy(2):
        for _ in range(2):
            model.train_on_batch(X[:8], Y[:8])
    return [message for _, message in logged("training step")]


def test_a_queue_of_examples(logged):
    (message,) = warnings(Queueing, logged)
    assert "self.queue.assign(" in message and "queue'" in message
    assert "keras_towers.gather" in message


def test_what_is_not_warned_of(logged):
    assert warnings(Alike, logged) == []


def test_logs_that_are_no_means(logged):
    derived, rows, vector = warnings(Reporting, logged)
    assert "'derived'" in derived and "self.mean.result()" in derived
    assert "'rows'" in rows and "tf.shape(data[0])[0]" in rows
    assert "'vector'" in vector and "one example of the batch" in vector
    assert all("keras.metrics" in each for each in (derived, rows, vector))
