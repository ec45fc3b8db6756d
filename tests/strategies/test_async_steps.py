"""Asynchronous towers: every batch is one step, and no step is lost."""

import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ordinary import Originals
from tests.kit.sampling import sample_of
from tests.kit.training import BATCH, STEPS, X, fit
from tests.kit.training import linear as small
from tests.strategies import async_cases as cases


class Counts(cases.Traced):
    """Counts its training steps in a weight."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return super().call(inputs)


def test_every_batch_is_one_step():
    traced = []
    layer = Counts(traced.append)
    model = small(layer, steps_per_execution=2)
    total = 0
    with kt.AsyncTowerStrategy(2) as strategy:

        def look(epochs, batches):
            # Of the last epoch alone.
            assert strategy.staleness.steps == batches, source

        for source in cases.SOURCES:
            total += cases.fits(model, source, look)
            # Other state of the model is shared too, and counts every step.
            assert int(layer.count) == total, source
            assert int(model.optimizer.iterations) == total, source
        # Once for each tower, whatever the size of the last batches.
        assert traced == [0, 1]
        model.compile("sgd", model.loss)
        fit(model)
        assert traced == 2 * [0, 1]


@pytest.mark.core
def test_a_step_that_changes_within_a_fit():
    layer = keras.layers.Dense(6)
    model, before = small(layer), []

    def freeze(epoch, logs):
        before.append(layer.get_weights())
        if epoch == 1:
            layer.trainable = False
            model.make_train_function(force=True)

    with kt.AsyncTowerStrategy(2):
        fit(model, 3, callbacks=[cases.callback(on_epoch_begin=freeze)])
    assert int(model.optimizer.iterations) == 3 * STEPS
    assert not np.array_equal(before[0][0], before[1][0])
    assert_all_close(before[1], layer.get_weights(), 0)


class Draws(cases.Traced):
    """Notes the numbers that towers draw."""

    def __init__(self):
        super().__init__(None)
        self.drawn = [], []
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, inputs, training=False):
        if training and (tower := cases.tower_of(inputs)) is not None:
            number = keras.random.uniform((), seed=self.seeds)
            tf.py_function(self.note, [tower, number], [])
        return inputs

    def note(self, tower, number):
        self.drawn[int(tower)].append(float(number))
        # Meanwhile the other tower takes a batch.
        time.sleep(0.01)


def test_towers_draw_numbers_of_their_own():
    layer, same = Draws(), keras.random.SeedGenerator(7)
    with kt.AsyncTowerStrategy(2):
        fit(small(layer), epochs=3)
    first, second = map(set, layer.drawn)
    assert first and second
    wanted = {float(keras.random.uniform((), seed=same)) for _ in range(12)}
    assert first <= wanted
    assert not second & wanted
    # Every draw has been counted.
    np.testing.assert_array_equal(layer.seeds.state, same.state)


def linear(optimizer, **kwargs):
    """A model whose gradients do not depend on its weights.

    So the sum of all updates is the same in every order.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(optimizer, lambda y, out: out * y, **kwargs)
    return model


def gradient(x, y):
    """The gradient of its kernel, on one batch."""
    return x.T @ np.tile(y, 3) / (3 * len(x))


EPOCH = sum(
    gradient(X[i : i + BATCH], cases.TARGETS[i : i + BATCH])
    for i in range(0, len(X), BATCH)
)


def slow_constraint(weight):
    """Reads a weight some time before it is written."""

    def wait(value):
        time.sleep(0.002)
        return value

    value = tf.convert_to_tensor(weight)
    waited = tf.py_function(wait, [value], value.dtype)
    return tf.ensure_shape(waited, value.shape)


@pytest.mark.parametrize(
    "options, constraint",
    sample_of(
        [
            ({"gradient_accumulation_steps": 4}, None),
            ({"use_ema": True, "ema_momentum": 0.9}, None),
            ({}, slow_constraint),
        ]
    ),
    ids=["accumulation", "ema", "constraint"],
)
def test_optimizers_that_read_and_write_lose_nothing(options, constraint):
    def train(run_eagerly):
        optimizer = keras.optimizers.SGD(0.5, **options)
        model = linear(optimizer, run_eagerly=run_eagerly)
        model.layers[0].kernel.constraint = constraint
        # All batches alike: averages then depend on no order.
        fit(model, x=np.ones_like(X), y=np.ones_like(cases.TARGETS), epochs=5)
        return model

    reference = train(run_eagerly=True)
    with kt.AsyncTowerStrategy(2, scale_gradient=False):
        model = train(run_eagerly=False)
    assert model.optimizer.iterations == reference.optimizer.iterations
    assert_all_close(model.weights, reference.weights, 1e-4)


@tf.custom_gradient
def slow_backwards(out):
    """Takes its time between the loss and the gradients."""

    def wait(gradient):
        time.sleep(0.01)
        return gradient

    def backward(upstream):
        waited = tf.py_function(wait, [upstream], upstream.dtype)
        return tf.ensure_shape(waited, upstream.shape)

    return tf.identity(out), backward


def test_gradients_are_unscaled_as_their_own_loss_was_scaled():
    """Although each update of another tower changes the scale."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=1
    )
    model = linear(optimizer)
    model.compile(optimizer, lambda y, out: slow_backwards(out) * y)
    kernel = model.layers[0].kernel
    wanted = kernel.numpy() - 0.5 * 2 * EPOCH
    with kt.AsyncTowerStrategy(2, scale_gradient=False):
        fit(model, y=cases.TARGETS, epochs=2)
    assert int(optimizer.dynamic_scale) == 8 << 2 * STEPS
    assert_close(kernel, wanted, 1e-5)


def test_a_backup_within_an_epoch_has_every_batch_that_was_handed_out(tmp_path):
    def train(*callbacks):
        model = linear(keras.optimizers.SGD(0.5))
        model.compile(model.optimizer, lambda y, out: slow_backwards(out) * y)
        before = model.layers[0].kernel.numpy()
        callbacks = [*callbacks, kt.Backup(tmp_path)]
        with kt.AsyncTowerStrategy(2, scale_gradient=False):
            fit(model, y=cases.TARGETS, epochs=2, callbacks=callbacks)
        return model.layers[0].kernel - before

    def end(batch, logs):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(cases.callback(on_train_batch_end=end))
    assert_close(train(), -0.5 * 2 * EPOCH, 1e-5)


def test_training_in_a_callback():
    """The fit that it interrupts goes on as it was."""
    model = linear(keras.optimizers.SGD(0.5))
    originals, kernel = Originals(model), model.layers[0].kernel
    # Of train_on_batch nothing is scaled: no other tower takes part.
    alone = gradient(X[:8], cases.TARGETS[:8])
    wanted = kernel.numpy() - 0.5 / 2 * 3 * EPOCH - 0.5 * alone
    strategy = kt.AsyncTowerStrategy(2)
    steps = []

    def after_an_epoch(epoch, logs):
        steps.append(strategy.staleness.steps)
        if epoch == 0:
            fit(model, y=cases.TARGETS)
            model.train_on_batch(X[:8], cases.TARGETS[:8])

    with strategy:
        watch = cases.callback(on_epoch_end=after_an_epoch)
        fit(model, y=cases.TARGETS, epochs=2, callbacks=[watch])
    originals.assert_back()
    assert steps == [STEPS, STEPS]
    assert_close(kernel, wanted, 1e-5)
