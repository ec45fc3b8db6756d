"""What a step writes by itself is what one device would have written."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import acts, written
from tests.kit.compare import assert_exact, assert_same, outcome
from tests.kit.training import X, Y, fit

TOWERS, SERVERS = kt.TowerStrategy, kt.ParameterServerTowerStrategy


class Reporting(acts.Stepping):
    """Reports results under other names, nested, and of hidden metrics.

    It counts and averages in variables that no layer tracks.
    """

    def prepare(self):
        self.hits = keras.metrics.TruePositives(name="hits")
        self.mean = keras.metrics.Mean(name="mean")
        self.unused = keras.metrics.Mean(name="counts_nothing")
        wrong = keras.metrics.FalsePositives()
        moving = keras.Variable(np.zeros(6, "float32"), trainable=False)
        self.__dict__["hidden"] = wrong, moving
        # So that nothing else makes TensorFlow trace a step twice.
        self.other = written.zeros(self)

    @property
    def metrics(self):
        return [self.mean, self.unused]

    def after(self, x, p):
        y, score = tf.cast(x[:, 0] > 0, tf.float32), tf.sigmoid(x[:, 1])
        wrong, moving = self.__dict__["hidden"]
        self.mean.update_state(score)
        for metric in self.hits, wrong:
            metric.update_state(y, score)
        moving.assign(0.7 * moving + 0.3 * tf.reduce_mean(x, 0))
        self.other.assign_add(1.0)

    def state(self):
        wrong, moving = self.__dict__["hidden"]
        return [wrong.result().numpy(), moving.numpy()]

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
    # The last batch has 2 examples: none for a third tower.
    history = fit(model, 1, X[:50], Y[:50], 12, callbacks=[note])
    return history, seen, model.state()


@functools.cache
def on_one_device(kind):
    return outcome(written.made(kind), trained, in_graph=False)


@pytest.mark.parametrize(
    "kind, strategy, options",
    [
        (written.Together, TOWERS, {}),
        (written.Together, TOWERS, {"run_eagerly": True}),
        (written.Unconditional, SERVERS, {}),
        (written.Looking, TOWERS, {}),
        (written.Queueing, TOWERS, {}),
        (written.Telling, TOWERS, {}),
    ],
)
def test_exact(kind, strategy, options):
    found = outcome(written.made(kind, **options), trained, strategy(3))
    assert_same(found, on_one_device(kind), tolerance=5e-6)


def test_native_variables_are_ordinary_between_steps_and_afterwards():
    def act(model):
        trained(model)
        model.steps.assign(100)
        model.mean.assign(tf.ones_like(model.mean))
        return trained(model)

    make = written.made(written.Native)
    model = assert_exact(make, act, kt.TowerStrategy(2), tolerance=5e-6).model
    assert model.steps.numpy() == 105
    model.steps.assign_add(1)
    np.testing.assert_array_equal(model.steps.numpy(), 106)


def test_what_no_layer_tracks_and_batches_of_other_sizes():
    def make():
        model = written.made(Reporting)()
        model.optimizer.build(model.trainable_variables)
        return model

    def act(model):
        # Which makes a function before fit does.
        for size in (2, 5, 12):
            model.train_on_batch(X[:size], Y[:size])
        return trained(model)

    assert_exact(make, act, kt.TowerStrategy(3), tolerance=5e-6)
