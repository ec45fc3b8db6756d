"""Asynchronous towers: every batch is one step, and no step is lost."""

import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import close, same_history
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import STEPS, X, Y, classifier, fit
from tests.strategies.async_cases import SameShape, Sleeps, dataset, within

TARGETS = (Y == 1).astype("float32")[:, None]


class Counts(keras.layers.Layer):
    """Counts its training steps in a weight."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs


def linear(optimizer):
    """A model whose gradients do not depend on its weights.

    So the sum of all updates is the same in every order.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(optimizer, lambda y, out: out * y)
    return model


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index : index + 8], Y[index : index + 8]


def _generator():
    while True:
        yield X[:8], Y[:8]


SOURCES = {
    "arrays": (lambda: {"x": X, "y": Y, "batch_size": 16}, 4),
    "one batch": (lambda: {"x": X, "y": Y, "batch_size": 64}, 1),
    "dataset": (lambda: {"x": dataset()}, 7),
    "unknown length": (lambda: {"x": dataset().filter(lambda *_: True)}, 7),
    "some steps": (
        lambda: {"x": dataset().repeat(), "steps_per_epoch": 4},
        4,
    ),
    "generator": (lambda: {"x": _generator(), "steps_per_epoch": 6}, 6),
    "PyDataset": (lambda: {"x": Pieces()}, 5),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_batch_is_one_step(source):
    make, batches = SOURCES[source]
    model = classifier(Counts(), steps_per_execution=2)
    with kt.AsyncTowerStrategy(3) as strategy:
        for epochs in (1, 3):
            model.fit(**make(), epochs=epochs, verbose=0)
            assert strategy.staleness.steps == batches
    assert int(model.optimizer.iterations) == 4 * batches
    # Other state of the model is shared too, and counts every step.
    assert int(model.layers[1].count) == 4 * batches


@pytest.mark.parametrize("scale", [True, False])
def test_no_update_is_lost(scale):
    reference = linear(keras.optimizers.SGD(0.5 / 4 if scale else 0.5))
    fit(reference, y=TARGETS, epochs=10)
    model = linear(keras.optimizers.SGD(0.5))
    originals = Originals(model)
    with kt.AsyncTowerStrategy(4, scale_gradient=scale):
        fit(model, y=TARGETS, epochs=10)
    originals.assert_back()
    assert_ordinary(model)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other, 1e-5)


class SlowConstraint(keras.constraints.Constraint):
    """Reads a weight some time before it is written."""

    def __call__(self, weight):
        def wait(value):
            time.sleep(0.002)
            return value

        value = tf.convert_to_tensor(weight)
        return tf.ensure_shape(
            tf.py_function(wait, [value], value.dtype), value.shape
        )


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4},
        {"use_ema": True, "ema_momentum": 0.9},
        {"constraint": SlowConstraint()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_optimizers_that_read_and_write_lose_nothing(options):
    rest = dict(options)
    constraint = rest.pop("constraint", None)

    def train(strategy):
        model = linear(keras.optimizers.SGD(0.5, **rest))
        model.layers[0].kernel.constraint = constraint
        with strategy:
            # All batches alike: averages then depend on no order.
            fit(model, x=np.ones_like(X), y=np.ones_like(TARGETS), epochs=8)
        return model

    reference = train(contextlib.nullcontext())
    model = train(kt.AsyncTowerStrategy(4, scale_gradient=False))
    assert model.optimizer.iterations == reference.optimizer.iterations
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other, 1e-4)


def test_several_optimizers_that_let_one_after_the_other_update():
    class TwoOptimizers(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            weights = iter(self.trainable_variables)
            other.apply([tf.ones_like(w) for w in weights], iter(self.weights))
            return logs

    other = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    model = TwoOptimizers([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.SGD(0.0, gradient_accumulation_steps=2), "mse"
    )
    other.build(model.trainable_variables)
    before = model.layers[0].bias.numpy()

    def train():
        with kt.AsyncTowerStrategy(2, scale_gradient=False):
            fit(model, y=TARGETS, epochs=2)

    within(60, train)
    assert int(other.iterations) == STEPS
    close(before - model.layers[0].bias, np.full(3, STEPS))


@pytest.mark.parametrize(
    "once_more, rate",
    [
        (lambda model: fit(model, y=TARGETS), 0.5 / 4),
        (lambda model: model.train_on_batch(X[:8], TARGETS[:8]), 0.5),
    ],
    ids=["fit", "train_on_batch"],
)
def test_training_in_a_callback(once_more, rate):
    """The fit that it interrupts goes on as it was."""
    reference = linear(keras.optimizers.SGD(0.5 / 4))
    fit(reference, y=TARGETS, epochs=2)
    reference.optimizer.learning_rate = rate
    once_more(reference)
    model = linear(keras.optimizers.SGD(0.5))
    strategy = kt.AsyncTowerStrategy(4)
    steps = []

    def after_an_epoch(epoch, logs):
        steps.append(strategy.staleness.steps)
        if epoch == 0:
            once_more(model)

    def train():
        watch = keras.callbacks.LambdaCallback(on_epoch_end=after_an_epoch)
        with strategy:
            fit(model, y=TARGETS, epochs=2, callbacks=[watch])

    within(60, train)
    assert steps == [STEPS, STEPS]
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other, 1e-5)


def test_evaluating_in_a_callback_waits_for_the_towers():
    model = classifier(Sleeps(0, 0.05, 0.05))
    counted = []

    def evaluate(batch, logs):
        model.predict(X, verbose=0)
        counted.append(int(model.optimizer.iterations))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=evaluate)
    with kt.AsyncTowerStrategy(3):
        fit(model, callbacks=[watch])
    assert counted == [1, 2, 3, 4]


def test_eager_models_take_turns():
    model = classifier(run_eagerly=True)
    with kt.AsyncTowerStrategy(3) as strategy:
        fit(model, epochs=2)
        assert strategy.staleness.histogram == {0: STEPS}
    assert int(model.optimizer.iterations) == 2 * STEPS


def test_one_tower_is_plain_training():
    reference, model = classifier(), classifier()
    wanted = fit(reference, epochs=2)
    with kt.AsyncTowerStrategy(1) as strategy:
        same_history(fit(model, epochs=2), wanted)
        assert strategy.staleness.max == 0


def test_fits_in_one_block_trace_once():
    traces = []

    class Traced(SameShape):
        def call(self, inputs):
            traces.extend("CPU" in tf.identity(inputs).device and [1] or [])
            return inputs

    model = classifier(Traced())
    with kt.AsyncTowerStrategy(3):
        fit(model)
        # Once for each tower, also for the smaller last batch.
        assert len(traces) == 3
        for _ in range(5):
            fit(model)
        assert len(traces) == 3
        model.compile("sgd", model.loss)
        fit(model)
        assert len(traces) == 6
    assert int(model.optimizer.iterations) == STEPS
