"""Every callback sees and does on towers what it does on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact, same_model
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import STEPS, X, Y, adam, classifier, fit

callbacks = keras.callbacks
VALIDATION = {"validation_data": (X[:20], Y[:20]), "validation_batch_size": 9}


def test_logs_of_every_batch():
    """Not only the epoch's: each batch's logs are those of one device."""

    def act(model):
        seen = []
        note = callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(
                {"batch": batch, **logs}
            ),
            on_test_batch_end=lambda batch, logs: seen.append(dict(logs)),
        )
        fit(model, callbacks=[note], **VALIDATION)
        assert len(seen) == STEPS + 3
        return seen

    assert_exact(classifier, act, kt.TowerStrategy(3))


def test_state_read_in_every_batch():
    """Weights, iterations, scheduled rate, slots; tensors and arrays."""

    def optimizer():
        return keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.7)
        )

    def act(model):
        seen = []

        def read(batch, logs):
            seen.append(
                [
                    model.get_weights()[0],
                    model.layers[0].kernel.numpy(),
                    np.array(model.layers[0].kernel),
                    float(tf.reduce_sum(model.layers[-1].kernel)),
                    float(model.optimizer.learning_rate),
                    int(model.optimizer.iterations.numpy()),
                    model.optimizer.variables[-1].numpy(),
                    float(model.metrics[0].result()),
                    model(X[:2]).numpy(),
                ]
            )

        fit(
            model,
            epochs=2,
            callbacks=[callbacks.LambdaCallback(on_train_batch_end=read)],
        )
        assert [row[5] for row in seen] == list(range(1, 2 * STEPS + 1))
        return seen

    assert_exact(
        lambda: classifier(optimizer=optimizer), act, kt.TowerStrategy(3)
    )


def test_early_stopping_restores_the_best_weights():
    def act(model):
        stop = callbacks.EarlyStopping(
            monitor="loss", mode="max", patience=1, restore_best_weights=True
        )
        history = fit(model, epochs=9, callbacks=[stop])
        # "max" of a falling loss: the first epoch is the best.
        assert stop.best_epoch == 0
        assert len(history["loss"]) == 2
        # All towers were set back, as what follows shows.
        return history, fit(model)

    assert_exact(classifier, act, kt.TowerStrategy(3))


@pytest.mark.parametrize(
    "updates, wrapped",
    [("once", False), ("each", False), ("sharded", False), ("once", True)],
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

    assert_exact(
        lambda: classifier(optimizer=optimizer),
        act,
        kt.TowerStrategy(3, updates=updates),
    )


def test_terminate_on_nan():
    """One bad example of the third batch, on one tower, stops it there."""
    spoiled = X.copy()
    spoiled[33] = np.nan

    def act(model):
        seen = []
        fit(
            model,
            x=spoiled,
            epochs=3,
            callbacks=[
                callbacks.TerminateOnNaN(),
                callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: seen.append(batch)
                ),
            ],
        )
        return seen

    reference, model = classifier(), classifier()
    originals = Originals(model)
    wanted = act(reference)
    with kt.TowerStrategy(3):
        found = act(model)
    assert found == wanted == [0, 1, 2]
    originals.assert_back()
    assert_ordinary(model)


def test_fit_of_another_model_inside_a_callback():
    """A probe is trained at the end of each epoch and confuses nothing."""

    class Probe(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.probe = classifier(optimizer=m.momentum)
            fit(self.probe)
            # The model in training can be used as well.
            self.scores = self.model.evaluate(X, Y, verbose=0)
            self.mine = self.model.predict(X[:5], verbose=0)

    def act(model):
        probe = Probe()
        history = fit(model, epochs=2, callbacks=[probe], **VALIDATION)
        probes.append(probe.probe)
        return history, probe.scores, probe.mine, probe.probe.get_weights()

    probes = []
    assert_exact(classifier, act, kt.TowerStrategy(3))
    assert_ordinary(probes[1])
    same_model(probes[1], probes[0])
