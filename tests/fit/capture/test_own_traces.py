"""Towers that trace a step by themselves trace the same, or it is told."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.splitting.cases.table import EXAMPLES, WIDTH, apply, mse, stepped

X = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype("float32")
Y = X.sum(1, keepdims=True)


def updated(model, x, y, noise):
    """A step that reads what it updates, so that each tower traces it."""
    with tf.GradientTape() as tape:
        loss = mse(y, model(x + noise, training=True))  # here
    logs = apply(model, tape, loss)
    model.optimizer.iterations.assign_add(0)
    return logs


GENERATOR = np.random.default_rng(1)


def by_a_generator(model, x, calls):
    return GENERATOR.normal(size=WIDTH).astype("float32")


def by_a_counter_in_a_branch(model, x, calls):
    return tf.cond(
        model.optimizer.iterations > 1,
        lambda: tf.zeros([WIDTH]) + float(len(calls)),  # here
        lambda: tf.zeros([WIDTH]),
    )


def by_other_operations(model, x, calls):
    return tf.sin(x) if len(calls) % 2 else tf.cos(x)  # here


def by_the_same(model, x, calls):
    drawn = keras.random.normal(tf.shape(x), seed=model.seeds)
    return np.random.normal(size=WIDTH).astype("float32") + 0 * drawn


def fitted(noise):
    calls = []

    def step(model, x, y):
        calls.append(None)
        return updated(model, x, y, noise(model, x, calls))

    strategy = kt.TowerStrategy(3)
    with strategy:
        model = stepped(step)
        model.seeds = keras.random.SeedGenerator(1)
        model.fit(X, Y, batch_size=EXAMPLES, verbose=0)
    return strategy.describe()


@pytest.mark.parametrize(
    "noise", [by_a_generator, by_a_counter_in_a_branch, by_other_operations]
)
def test_another_trace_is_told(logged, noise):
    assert "differs from that of one device" in fitted(noise)
    ((_, said),) = logged("on tower 1 than on tower 0")
    assert "# here" in said and "Draw with keras.random" in said


def test_the_same_trace_is_not(logged):
    fitted(by_the_same)
    assert logged("every tower traces the step")
    assert not logged("on tower")
