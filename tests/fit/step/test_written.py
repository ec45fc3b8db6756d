"""What a step writes by itself is what one device would have written."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import written
from tests.kit.compare import assert_exact, assert_same, outcome
from tests.kit.training import X, Y, fit

TOWERS, SERVERS = kt.TowerStrategy, kt.ParameterServerTowerStrategy


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
