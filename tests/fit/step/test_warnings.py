"""Warnings of what a step does that towers may not do as one device."""

import contextlib

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step import written
from tests.fit.step.written import Stepping, made
from tests.kit.compare import close, same_history
from tests.kit.training import X, Y, classifier


class Queueing(Stepping):
    """Keeps the last features, as NNCLR does."""

    def prepare(self):
        self.queue = self.add_weight(
            shape=(4, 6), initializer="zeros", trainable=False, name="queue"
        )

    def features(self, x):
        return x

    def after(self, x, p):
        rows = self.features(x)
        self.queue.assign(tf.concat([rows, self.queue], 0)[:4])


class Gathering(Queueing):
    def features(self, x):
        return kt.gather(x)


class Reporting(Stepping):
    def prepare(self):
        self.mean = keras.metrics.Mean()

    def train_step(self, data):
        logs = super().train_step(data)
        mean = keras.ops.exp(self.mean.result())
        rows = tf.shape(data[0])[0]
        return {**logs, "rows": rows, "vector": data[0][0], "derived": mean}


def warnings(kind, caplog, **options):
    caplog.clear()
    model = made(kind)()
    model.name = f"of_{kind.__name__.lower()}"
    with kt.TowerStrategy(2, **options):
        for _ in range(2):
            model.train_on_batch(X[:8], Y[:8])
    return [r.getMessage() for r in caplog.records if "the step" in r.message]


def test_a_queue_of_examples(caplog):
    (message,) = warnings(Queueing, caplog)
    assert "queue' from the batch" in message
    assert "keras_towers.gather" in message


@pytest.mark.parametrize(
    "kind",
    [Gathering, written.Averaging, written.Counting, written.Clipping],
)
def test_what_is_not_warned_of(kind, caplog):
    assert warnings(kind, caplog) == []


def test_keras_own_statistics_are_not_warned_of(caplog):
    model = classifier(keras.layers.BatchNormalization())
    with kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert "the step writes" not in caplog.text


def test_logs_that_are_no_means(caplog):
    derived, rows, vector = sorted(warnings(Reporting, caplog))
    assert "'derived'" in derived and "from a metric's result" in derived
    assert "'rows', a int32 of shape ()" in rows and "tower 0" in rows
    assert "'vector'" in vector and "mean over the towers" in vector


def test_a_model_recompiled_by_a_callback_is_exact():
    def run(strategy):
        model = made(Stepping)()
        plain = keras.Sequential(m.mlp().layers)
        plain.set_weights(model.get_weights())

        def compiled(rate):
            plain.compile(
                keras.optimizers.SGD(rate),
                m.cross_entropy(),
                metrics=["accuracy"],
            )

        def again(epoch, logs=None):
            compiled(0.002)
            plain.make_train_function()

        compiled(0.001)
        note = keras.callbacks.LambdaCallback(on_epoch_end=again)
        with strategy:
            history = plain.fit(
                X,
                Y,
                batch_size=12,
                epochs=3,
                shuffle=False,
                verbose=0,
                callbacks=[note],
            ).history
        return history, plain.get_weights()

    wanted = run(contextlib.nullcontext())
    found = run(kt.TowerStrategy(3))
    for a, b in zip(found[1], wanted[1], strict=True):
        close(a, b)
    same_history(found[0], wanted[0], 1e-5)
