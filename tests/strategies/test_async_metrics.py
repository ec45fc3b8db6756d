"""Asynchronous towers: logs and metrics are those of all steps together."""

import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import close, same_history
from tests.kit.training import STEPS, X, Y, fit
from tests.strategies.async_cases import Sleeps

TARGETS = (Y == 1).astype("float32")[:, None]


def still(*first):
    """A classifier that does not learn, so that metrics can be compared."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            *first,
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.0),
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
    )
    return model


def weighted(model):
    """The history of a fit that does all that Keras does with metrics."""
    return fit(
        model,
        epochs=3,
        y=TARGETS,
        class_weight={0: 1.0, 1: 3.0},
        validation_data=(X, TARGETS),
    )


@functools.cache
def weighted_on_one_device():
    return weighted(still())


@pytest.mark.parametrize("towers, steps_per_execution", [(2, 1), (4, 3)])
def test_metrics_are_exact_sums(towers, steps_per_execution):
    model = still()
    model.steps_per_execution = steps_per_execution
    with kt.AsyncTowerStrategy(towers):
        same_history(weighted(model), weighted_on_one_device())


def test_callbacks_see_every_step_and_the_last_exactly():
    steps, last = [], {}

    def note(batch, logs):
        steps.append(batch)
        last.update(logs)

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    with kt.AsyncTowerStrategy(3):
        # Slow enough to be caught in the middle of the last steps.
        model = still(Sleeps(0.03, 0.03, 0.03))
        history = fit(model, epochs=2, y=TARGETS, callbacks=[watch])
    assert steps == [*range(STEPS)] * 2
    assert last.keys() == history.keys()
    for name, values in history.items():
        close(last[name], values[-1])


@pytest.mark.parametrize("eagerly", [False, True])
def test_logs_that_are_no_metrics(eagerly):
    """Neither is one under the name of a metric that counts nothing."""
    model = m.OwnLog()
    model.compile("sgd", run_eagerly=eagerly)
    with kt.AsyncTowerStrategy(3):
        history = fit(model, epochs=2)
    assert history.keys() == {"loss", "this_batch", "double"}
    own = np.array(history["this_batch"])
    assert (own > 0).all()
    close(2 * own, history["double"])


def test_stateless_metric_in_a_step():
    class Step(keras.Sequential):
        def train_step(self, data):
            state = metric.stateless_update_state(metric.variables, 3.0)
            result = metric.stateless_result(state)
            return {**super().train_step(data), "stateless": result}

    metric = keras.metrics.Mean(name="mean")
    model = Step([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", m.cross_entropy())
    with kt.AsyncTowerStrategy(2):
        assert fit(model)["stateless"] == [3.0]
    assert not any(variable.numpy() for variable in metric.variables)
