"""What a step writes by itself is what one device would have written."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.fit.step import written
from tests.kit.compare import assert_exact, assert_same, close, outcome
from tests.kit.long import long_but
from tests.kit.training import X, Y

TOWERS, SERVERS = kt.TowerStrategy, kt.ParameterServerTowerStrategy


def trained(model):
    # The last batch has 2 examples: none for a third tower.
    history = model.fit(
        X[:50], Y[:50], batch_size=12, shuffle=False, verbose=0
    ).history
    return history, getattr(model, "state", list)()


@functools.cache
def on_one_device(kind):
    return outcome(written.made(kind), trained, in_graph=False)


@pytest.mark.parametrize(
    "kind, strategy, options",
    [
        (written.Together, TOWERS, {}),
        (written.Together, TOWERS, {"run_eagerly": True}),
        (written.Unconditional, SERVERS, {}),
        *long_but(
            lambda _: False,
            [
                (written.ClippingSometimes, SERVERS, {}),
                (written.Together, SERVERS, {"run_eagerly": True}),
                (written.TwoUpdates, SERVERS, {}),
            ],
        ),
        (written.Looking, TOWERS, {}),
    ],
)
def test_exact(kind, strategy, options):
    found = outcome(written.made(kind, **options), trained, strategy(3))
    assert_same(found, on_one_device(kind), tolerance=5e-6)


def copies_of_mean(model):
    """The mean of a native variable's copies."""
    native = tf.distribute.get_strategy()._components.update.spread.native
    (found,) = (native[v] for v in native if v.name == model.mean.name)
    return [float(np.mean(part)) for part in found.values]


def test_native_variables_are_ordinary_afterwards(caplog):
    model = written.made(written.Native)()
    with kt.TowerStrategy(2):
        trained(model)
        # Written outside of a step, it has the value on every tower.
        model.steps.assign(100)
        model.mean.assign(tf.ones_like(model.mean))
        close(copies_of_mean(model), 1.0)
        trained(model)
    assert model.steps.numpy() == 105
    model.steps.assign_add(1)
    np.testing.assert_array_equal(model.steps.numpy(), 106)
    assert "tf.Variable 'steps'" in caplog.text


def test_a_native_sum_is_refused():
    model = written.made(written.Native)()
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="n")
    model.after = lambda x, p: total.assign_add(1.0)
    with (
        pytest.raises(kt.TowerError, match="'n'.*keras.Variable"),
        kt.TowerStrategy(2),
    ):
        trained(model)


def test_changing_batch_sizes():
    batches = [12, 5, 2, 12]

    def act(model):
        start, history = 0, []
        for size in batches:
            x, y = X[start : start + size], Y[start : start + size]
            history.append(model.train_on_batch(x, y))
            start = (start + size) % 40
        return history

    make = written.made(written.BatchMeans)
    assert_exact(make, act, kt.TowerStrategy(3), tolerance=5e-6)


class Hidden(written.Stepping):
    """Counts and averages in variables that no layer tracks."""

    def prepare(self):
        hits = keras.metrics.TruePositives()
        mean = keras.Variable(np.zeros(6, "float32"), trainable=False)
        self.__dict__["hidden"] = hits, mean
        # So that nothing else makes TensorFlow trace a step twice.
        self.other = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def after(self, x, p):
        hits, mean = self.__dict__["hidden"]
        hits.update_state(x[:, 0] > 0, tf.sigmoid(x[:, 1]))
        mean.assign(0.7 * mean + 0.3 * tf.reduce_mean(x, 0))
        self.other.assign_add(1.0)

    def state(self):
        hits, mean = self.__dict__["hidden"]
        return [hits.result().numpy(), mean.numpy()]


def test_what_no_layer_tracks():
    def make():
        model = written.made(Hidden)()
        model.optimizer.build(model.trainable_variables)
        return model

    def act(model):
        # Which makes a function before fit does.
        model.train_on_batch(X[:2], Y[:2])
        return trained(model)

    assert_exact(make, act, kt.TowerStrategy(3), tolerance=5e-6)
