"""Asynchronous towers: every batch is one step, and no step is lost."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.ordinary import (
    STEPS,
    Originals,
    X,
    Y,
    assert_ordinary,
    classifier,
    close,
    fit,
    same_history,
)
from tests.strategies.async_cases import SameShape, Sleeps, dataset

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


def test_gradient_accumulation_loses_nothing():
    def optimizer():
        return keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)

    reference = linear(optimizer())
    fit(reference, y=TARGETS, epochs=25)
    model = linear(optimizer())
    with kt.AsyncTowerStrategy(4, scale_gradient=False):
        fit(model, y=TARGETS, epochs=25)
    assert int(model.optimizer.iterations) == 25
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other, 1e-4)


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
