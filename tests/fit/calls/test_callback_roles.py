"""Every callback sees and does on towers what it does on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit.compare import assert_exact, assert_same_model
from tests.kit.sampling import long_unless
from tests.kit.training import STEPS, X, Y, adam, fit, linear

pytestmark = pytest.mark.alternate

callbacks = keras.callbacks
VALIDATION = {"validation_data": (X[:20], Y[:20]), "validation_batch_size": 9}


def test_logs_and_state_of_every_batch():
    """Weights, iterations, scheduled rate, slots; tensors and arrays."""

    def make():
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.7)
        return linear(
            optimizer=lambda: keras.optimizers.Adam(rate), metrics=["accuracy"]
        )

    def act(model):
        trained, tested = [], []

        def read(batch, logs):
            trained.append(
                [
                    int(model.optimizer.iterations.numpy()),
                    {"batch": batch, **logs},
                    model.get_weights()[0],
                    np.array(model.layers[0].kernel),
                    float(tf.reduce_sum(model.layers[0].kernel)),
                    float(model.optimizer.learning_rate),
                    model.optimizer.variables[-1].numpy(),
                    float(model.metrics[0].result()),
                    model(X[:2]).numpy(),
                ]
            )

        note = callbacks.LambdaCallback(
            on_train_batch_end=read,
            on_test_batch_end=lambda batch, logs: tested.append(dict(logs)),
        )
        fit(model, 2, callbacks=[note], **VALIDATION)
        assert [row[0] for row in trained] == list(range(1, 2 * STEPS + 1))
        assert len(tested) == 2 * 3
        return trained, tested

    assert_exact(make, act, kt.TowerStrategy(2))


@pytest.mark.parametrize(
    "updates, wrapped",
    long_unless(
        ("once", True).__eq__,
        [("once", True), ("each", False), ("sharded", False)],
    ),
)
def test_swap_ema_weights(updates, wrapped):
    def optimizer():
        inner = adam(use_ema=True, ema_momentum=0.8)
        if wrapped:
            return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64)
        return inner

    def act(model):
        swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
        history = fit(model, epochs=2, callbacks=[swap], **VALIDATION)
        return history, fit(model)

    strategy = kt.TowerStrategy(2, updates=updates)
    make = functools.partial(linear, optimizer=optimizer)
    assert_exact(make, act, strategy)


def test_callbacks_may_evaluate_train_and_stop(variables_on_towers):
    """They use the model, train another one, and end the training."""
    probes = []

    def act(model):
        found = []

        def probe(epoch, logs):
            if epoch == 0:
                probes.append(linear(run_eagerly=model.run_eagerly))
                fit(probes[-1])
            found.append(model.evaluate(X, Y, verbose=0))
            metric = keras.metrics.SparseCategoricalAccuracy()
            metric.update_state(Y, model(X))
            metric.update_state(Y[:3], model.predict(X[:3], verbose=0))
            found.append(metric.result())

        stop = callbacks.EarlyStopping(
            monitor="loss", mode="max", patience=1, restore_best_weights=True
        )
        calls = [callbacks.LambdaCallback(on_epoch_end=probe), stop]
        history = fit(model, 9, callbacks=calls, **VALIDATION)
        # "max" of a falling loss: the first epoch is the best.
        assert stop.best_epoch == 0
        assert len(history["loss"]) == 2
        # All towers were set back, as what follows shows.
        return history, found, fit(model)

    assert_exact(linear, act, kt.TowerStrategy(2))
    assert not variables_on_towers()
    assert_ordinary(probes[-1], trains_on_towers=True)
    assert_same_model(probes[-1], probes[0])
