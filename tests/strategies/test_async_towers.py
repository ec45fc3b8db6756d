"""Asynchronous towers: every batch is one step, whatever happens beside it."""

import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import (
    Originals,
    assert_ordinary,
)
from tests.kit import compare
from tests.kit.again import begin_again
from tests.kit.leaving import Boom, interrupt
from tests.kit.sampling import sample_of
from tests.kit.training import BATCH, STEPS, X, Y, fit, linear
from tests.strategies import async_cases as cases
from tests.strategies.async_cases import dataset

pytestmark = pytest.mark.alternate


def test_other_methods_are_exact():
    model, reference = (
        linear(keras.layers.BatchNormalization()) for _ in range(2)
    )
    reference.run_eagerly = True
    wanted = [reference.train_on_batch(X[:9], Y[:9]) for _ in range(2)]
    with kt.AsyncTowerStrategy(2):
        compare.assert_close(
            [model.train_on_batch(X[:9], Y[:9]) for _ in range(2)], wanted
        )
        compare.assert_all_close(model.weights, reference.weights)
        fit(model)
        inside = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        outputs = model.predict(X, batch_size=BATCH, verbose=0)
    model.run_eagerly = True
    compare.assert_close(
        model.evaluate(X, Y, batch_size=BATCH, verbose=0), inside
    )
    compare.assert_close(model(X), outputs)
    assert int(model.optimizer.iterations) == 2 + STEPS


def test_a_model_built_inside_and_a_custom_loop():
    strategy = kt.strategy("async", towers=2)
    with strategy.scope():
        model = linear(optimizer=lambda: keras.optimizers.SGD(0.1))
    fit(model)
    reference = linear(optimizer=lambda: keras.optimizers.SGD(0.1))
    reference.set_weights(model.get_weights())

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def on_replicas(x, y):
        return strategy.run(step, (model, x, y))

    with strategy.scope():
        losses = strategy.experimental_local_results(on_replicas(X, Y))
    compare.assert_close(losses, [step(reference, X, Y) / 2] * 2)
    # Here the towers wait for each other.
    compare.assert_all_close(model.weights, reference.weights)
    assert int(model.optimizer.iterations) == STEPS + 1


def test_empty_and_distributed_data_are_refused():
    model = linear()
    with kt.AsyncTowerStrategy(2) as strategy:
        with pytest.raises(kt.TowerError, match="distributed dataset"):
            model.fit(strategy.experimental_distribute_dataset(dataset()))
        for nothing in (dataset().take(0), dataset().filter(lambda *_: False)):
            with pytest.raises(kt.TowerError, match="empty"):
                model.fit(nothing, verbose=0)
        # Fewer examples than towers are enough.
        model.fit(X[:1], Y[:1], verbose=0)
    assert_ordinary(model)


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
    model = linear(layer, steps_per_execution=2)
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
    model, before = linear(layer), []

    def freeze(epoch, logs):
        before.append(layer.get_weights())
        if epoch == 1:
            layer.trainable = False
            model.make_train_function(force=True)

    with kt.AsyncTowerStrategy(2):
        fit(model, 3, callbacks=[cases.callback(on_epoch_begin=freeze)])
    assert int(model.optimizer.iterations) == 3 * STEPS
    assert not np.array_equal(before[0][0], before[1][0])
    compare.assert_all_close(before[1], layer.get_weights(), 0)


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
        fit(linear(layer), epochs=3)
    first, second = map(set, layer.drawn)
    assert first and second
    wanted = {float(keras.random.uniform((), seed=same)) for _ in range(12)}
    assert first <= wanted
    assert not second & wanted
    # Every draw has been counted.
    np.testing.assert_array_equal(layer.seeds.state, same.state)


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
        model = cases.order_free(optimizer, run_eagerly=run_eagerly)
        model.layers[0].kernel.constraint = constraint
        # All batches alike: averages then depend on no order.
        fit(model, x=np.ones_like(X), y=np.ones_like(cases.TARGETS), epochs=5)
        return model

    reference = train(run_eagerly=True)
    with kt.AsyncTowerStrategy(2, scale_gradient=False):
        model = train(run_eagerly=False)
    assert model.optimizer.iterations == reference.optimizer.iterations
    compare.assert_all_close(model.weights, reference.weights, 1e-4)


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
    model = cases.order_free(optimizer)
    model.compile(optimizer, lambda y, out: slow_backwards(out) * y)
    kernel = model.layers[0].kernel
    wanted = kernel.numpy() - 0.5 * 2 * EPOCH
    with kt.AsyncTowerStrategy(2, scale_gradient=False):
        fit(model, y=cases.TARGETS, epochs=2)
    assert int(optimizer.dynamic_scale) == 8 << 2 * STEPS
    compare.assert_close(kernel, wanted, 1e-5)


def test_a_backup_within_an_epoch_has_every_batch_that_was_handed_out(tmp_path):
    def train(*callbacks):
        model = cases.order_free(keras.optimizers.SGD(0.5))
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
    begin_again()
    compare.assert_close(train(), -0.5 * 2 * EPOCH, 1e-5)


def test_training_in_a_callback():
    """The fit that it interrupts goes on as it was."""
    model = cases.order_free(keras.optimizers.SGD(0.5))
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
    compare.assert_close(kernel, wanted, 1e-5)


def test_a_slow_tower_holds_nobody_and_is_stale(tmp_path):
    seen = []
    layer = cases.Late(20)
    model = linear(layer, metrics=["accuracy"])
    with kt.AsyncTowerStrategy(3) as strategy:
        assert (strategy.staleness.mean, strategy.staleness.max) == (0, 0)
        look = cases.callback(
            on_epoch_end=lambda *_: seen.append(strategy.staleness)
        )
        board = keras.callbacks.TensorBoard(tmp_path)
        history = cases.endless(model, 40, epochs=2, callbacks=[look, board])
    assert layer.held_nobody
    assert len(layer.begun) == int(model.optimizer.iterations) == 80
    for found in seen:
        assert found.steps == sum(found.histogram.values()) == 40
        values = np.repeat([*found.histogram], [*found.histogram.values()])
        assert found.mean == pytest.approx(values.mean())
        assert str(found) == (
            f"mean {values.mean():.2f}, max {values.max()} over 40 steps"
        )
    # Two of those that had begun may not have ended.
    assert 18 <= seen[0].max < 40
    # History is that of the model, with names as on one device.
    assert history.keys() == {"loss", "accuracy"}
    there = cases.written(tmp_path)
    for epoch in (0, 1):
        for name in ("mean", "max"):
            value = there[f"epoch_staleness_{name}", epoch]
            compare.assert_close(value, getattr(seen[epoch], name))
        assert ("staleness", epoch) in there


@pytest.mark.parametrize("epochs, examples", [(1, 53), (50, 32)])
def test_nan_ends_training_after_its_epoch(epochs, examples):
    """Also where an epoch is over before its first log can be looked at."""
    model = linear()
    with kt.AsyncTowerStrategy(2):
        x, stop = cases.some_bad(0)[:examples], keras.callbacks.TerminateOnNaN()
        history = fit(model, epochs, x, Y[:examples], callbacks=[stop])
    assert model.stop_training
    assert len(history["loss"]) == 1
    assert np.isnan(history["loss"][-1])


def test_steps_that_were_handed_out_are_done_when_training_stops():
    """What was handed out is done and counted; training goes on."""

    def stop(batch, logs):
        model.stop_training = batch == 1

    def broken():
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise Boom("no more data")

    model = linear()
    originals = Originals(model)
    with kt.AsyncTowerStrategy(2) as strategy:
        watch = cases.callback(on_train_batch_end=stop)
        fit(model, epochs=5, callbacks=[watch])
        assert strategy.staleness.steps == 2
        assert int(model.optimizer.iterations) == 2
        with pytest.raises(tf.errors.OpError, match="no more data"):
            model.fit(broken(), verbose=0)
        assert int(model.optimizer.iterations) == 2 + 2
        fit(model)
    assert int(model.optimizer.iterations) == 2 + 2 + STEPS
    originals.assert_back()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_any_moment():
    model = linear()
    originals = Originals(model)
    timer = threading.Timer(0.03, interrupt)

    def start(batch, logs):
        if batch == 2 and timer.ident is None:
            timer.start()

    stop = cases.callback(on_train_batch_end=start)
    with kt.AsyncTowerStrategy(2):
        with pytest.raises(KeyboardInterrupt):
            fit(model, epochs=1000, callbacks=[stop])
        before = int(model.optimizer.iterations)
        assert before >= 3
        fit(model)
    assert int(model.optimizer.iterations) == before + STEPS
    originals.assert_back()
    compare.assert_finite(model)


@pytest.mark.parametrize(
    "strategy, updates",
    [
        (kt.AsyncTowerStrategy, STEPS),
        # What others had pushed is not averaged later.
        (kt.SyncReplicasStrategy, STEPS // 2),
    ],
)
def test_an_error_on_a_tower_is_raised_by_fit(strategy, updates):
    def fail(tower):
        traced.append(tower)
        if traced == [0, 1]:
            raise Boom("only on tower 1")

    traced = []
    model = linear(cases.Traced(fail), cases.Runs(cases.refuse))
    originals = Originals(model)

    with strategy(towers=2):
        with pytest.raises(Boom, match="only on tower 1"):
            fit(model)
        # Behind the last step of all, nobody hands out a batch and looks.
        for at, epochs in ((2, 3), (STEPS - 1, 1)):
            begin = int(model.optimizer.iterations)
            with pytest.raises(tf.errors.OpError, match="not a number"):
                fit(model, x=cases.some_bad(at), epochs=epochs)
            before = int(model.optimizer.iterations)
            assert before <= begin + STEPS
            fit(model)
            assert int(model.optimizer.iterations) == before + updates
    originals.assert_back()
    compare.assert_finite(model)
