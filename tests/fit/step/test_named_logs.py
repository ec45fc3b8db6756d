"""Logs are results of metrics by what they are, not by their names."""

import keras
import pytest
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
        self.__dict__["hidden"] = [keras.metrics.FalsePositives()]

    @property
    def metrics(self):
        return [self.mean]

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
            # A value of the step, and no result of the metric of that name.
            "mean": tf.reduce_mean(data[0][:, 2]),
        }


def trained(model):
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            {k: v for k, v in logs.items() if k != "parts"}
        )
    )
    history = model.fit(
        X,
        Y,
        batch_size=12,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[note],
    ).history
    return history["found"], history["mean"], history["loss"], seen


@pytest.mark.parametrize(
    "strategy, eager",
    [
        (lambda: kt.TowerStrategy(3), False),
        (lambda: kt.TowerStrategy(8), True),
        (lambda: kt.ParameterServerTowerStrategy(2), False),
    ],
    ids=["three", "eight-eager", "servers"],
)
def test_exact(strategy, eager):
    make = made(Reporting, run_eagerly=eager)
    assert_exact(make, trained, strategy(), tolerance=5e-6)


def test_a_vector_of_losses():
    def make():
        model = made(Stepping)()
        plain = keras.Sequential(model.layers)
        plain.compile(
            keras.optimizers.SGD(0.001),
            keras.losses.SparseCategoricalCrossentropy(reduction="none"),
        )
        return plain

    def act(model):
        return model.fit(
            X, Y, batch_size=11, epochs=2, shuffle=False, verbose=0
        )

    # Sums over the batch make large steps, which amplify what is rounded.
    assert_exact(make, act, kt.TowerStrategy(3), tolerance=5e-5)
