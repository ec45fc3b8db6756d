"""A step is traced once for all towers, unless another's might differ."""

import logging
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.step import one_trace
from tests.exactness import models as m
from tests.kit.compare import same_history, same_model
from tests.kit.long import long_but
from tests.kit.training import classifier, fit

_traces: dict[str, int] = {}


class Traced(keras.layers.Layer):
    """Counts how often a tower traces it, and does something else besides.

    Args:
        act: called with the input; returns the output.
    """

    def __init__(self, act=lambda x: x):
        super().__init__()
        self.act = act
        # Attributes are put back to what they would be on one device.
        _traces[self.name] = 0

    @property
    def traces(self):
        return _traces[self.name]

    def call(self, x):
        if tower_lib.current() is not None:
            _traces[self.name] += 1
        return self.act(x)


@pytest.fixture
def reasons(monkeypatch, caplog):
    """Why steps were traced by every tower."""
    monkeypatch.setattr(told, "_said", set())
    caplog.set_level(logging.INFO, "keras_towers")
    start = "because it "
    return lambda: [
        r.getMessage().partition(start)[2]
        for r in caplog.records
        if start in r.getMessage()
    ]


def trained(strategy, *layers, monkeypatch=None, **options):
    """A model trained on towers; each tower traces if ``monkeypatch``."""
    keras.utils.set_random_seed(1)
    model = classifier(*layers, **options)
    if monkeypatch is not None:
        monkeypatch.setattr(one_trace.OneTrace, "_shared", lambda *args: None)
    with strategy:
        history = fit(model, epochs=2)
    return model, history


@pytest.mark.parametrize("towers", [2, 4])
def test_one_trace_for_all_towers(towers, reasons):
    layer = Traced()
    trained(kt.TowerStrategy(towers), layer)
    assert layer.traces == 1
    assert reasons() == []


STRATEGIES = {
    "once": lambda: kt.TowerStrategy(4),
    "each": lambda: kt.TowerStrategy(4, updates="each"),
    "held once": lambda: kt.ParameterServerTowerStrategy(4),
}


@pytest.mark.parametrize("name", long_but("each".__ne__, STRATEGIES))
def test_the_same_as_traces_of_all_towers(name, reasons, monkeypatch):
    def layers():
        # Their initializers take a seed when they are made.
        keras.utils.set_random_seed(1)
        return (
            keras.layers.Dense(6, use_bias=False, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=3),
        )

    one, found = trained(STRATEGIES[name](), *layers())
    assert reasons() == []
    each, wanted = trained(
        STRATEGIES[name](), *layers(), monkeypatch=monkeypatch
    )
    same_history(found, wanted)
    same_model(one, each)


def _counted():
    counter = tf.Variable(0.0, trainable=False)

    def act(x):
        counter.assign_add(1.0)
        return x

    return act


def _shown(x):
    tf.print("x", output_stream="file:///dev/null")
    return x


def _placed(x):
    with tf.device("CPU:0"):
        return x + 1


DIFFERENT = {
    "exchanges values": lambda x: x + 0 * tf.reduce_mean(kt.gather(x)),
    "asks which tower": lambda x: x + 0.1 * kt.current_tower().index,
    "has effects": _shown,
    "puts ": _placed,
}


@pytest.mark.parametrize("reason", DIFFERENT)
def test_traces_of_all_towers_where_they_may_differ(reason, reasons):
    layer = Traced(DIFFERENT[reason])
    trained(kt.TowerStrategy(3), layer)
    assert any(why.startswith(reason) for why in reasons())
    assert layer.traces >= 3


def test_a_replica_id_that_is_asked_for(reasons):
    def act(x):
        context = tf.distribute.get_replica_context()
        index = tf.cast(context.replica_id_in_sync_group, x.dtype)
        return x * (1 + index)

    trained(kt.TowerStrategy(3), Traced(act))
    assert reasons() == ["asks which tower it runs on"]


def test_rows_of_draws(reasons):
    trained(kt.TowerStrategy(3, random="global"), keras.layers.Dropout(0.5))
    assert reasons() == ["draws its own rows of random numbers"]


def test_a_first_write(reasons):
    """From then on towers have components, and one trace will do."""
    layer = Traced(_counted())
    trained(kt.TowerStrategy(3), layer)
    assert reasons() == ["writes a variable that the towers had in common"]
    assert layer.traces == 5


class Caught(Exception):
    """Any error of a user's step."""


def test_what_the_step_catches_is_not_lost(reasons):
    def act(x):
        try:
            return x + 0 * tf.reduce_mean(kt.gather(x))
        except Exception:
            return x

    trained(kt.TowerStrategy(3), Traced(act))
    assert reasons() == ["exchanges values with other towers"]


class After(keras.Model):
    """A custom step that does something after its update."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.after(loss, x, y)

    def after(self, loss, x, y):
        return {"loss": loss}


class Reads(After):
    def after(self, loss, x, y):
        return {"loss": loss, "norm": tf.norm(self.trainable_weights[0])}


class Twice(After):
    def after(self, loss, x, y):
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Keeps(After):
    def after(self, loss, x, y):
        self.latest = loss
        return {"loss": loss}


class Iterates(After):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)
        self.optimizer.apply(grads, iter(weights))
        return {"loss": loss}


@pytest.mark.parametrize(
    "step, wanted",
    [
        (After, []),
        (Iterates, []),
        (Reads, ["uses variables after its update"]),
        (Twice, ["calls optimizers several times"]),
        (Keeps, ["keeps tensors in attributes"]),
    ],
)
def test_custom_steps(step, wanted, reasons, monkeypatch):
    def make():
        keras.utils.set_random_seed(1)
        inner = m.mlp()
        model = step(inner.inputs, inner.outputs)
        model.compile(keras.optimizers.Adam(0.01), m.cross_entropy())
        return model

    one, each = make(), make()
    with kt.TowerStrategy(3):
        found = fit(one, epochs=2)
    assert reasons() == wanted
    monkeypatch.setattr(one_trace.OneTrace, "_shared", lambda *args: None)
    with kt.TowerStrategy(3):
        history = fit(each, epochs=2)
    same_history(found, history)
    same_model(one, each)


class Conditional(After):
    """Applies its gradients in a branch, behind many other operations."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        grads = tape.gradient(loss, weights)

        def apply():
            total = loss
            for _ in range(400):
                total += 1.0
            self.optimizer.apply(grads, weights)
            return total

        return {"loss": tf.cond(loss > 1e9, apply, lambda: loss)}


def test_gradients_applied_in_a_branch_stay_there(reasons):
    inner = m.mlp()
    model = Conditional(inner.inputs, inner.outputs)
    model.compile(keras.optimizers.Adam(0.01), m.cross_entropy())
    with kt.TowerStrategy(3), pytest.raises(kt.TowerError, match="tf.cond"):
        fit(model)
    (why,) = reasons()
    assert why == "applies gradients in control flow or a function"


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that depends on how many examples a metric has seen."""

    def __init__(self, metric):
        self.metric = metric

    def __call__(self, step):
        return 0.01 / (1.0 + tf.cast(self.metric.count, tf.float32))


class Counts(After):
    @property
    def metrics(self):
        return [self.seen]

    def after(self, loss, x, y):
        self.seen.update_state(loss)
        return {"seen": self.seen.result()}


def test_an_update_that_is_not_keras_own_runs_where_the_step_calls_it(
    reasons, monkeypatch
):
    def weights(towers):
        keras.utils.set_random_seed(1)
        inner = m.mlp()
        model = Counts(inner.inputs, inner.outputs)
        model.seen = keras.metrics.Mean(name="seen")
        rate = Steps(model.seen)
        model.compile(keras.optimizers.SGD(rate), m.cross_entropy())
        with kt.TowerStrategy(towers):
            fit(model)
        return model

    found = weights(2)
    assert reasons() == ["updates weights by Steps, which is not Keras's"]
    monkeypatch.setattr(one_trace.OneTrace, "_shared", lambda *args: None)
    same_model(found, weights(2))


def test_a_trace_that_is_dropped_draws_nothing(reasons):
    drawn = []

    def act(x):
        drawn.append((random.random(), np.random.rand()))
        return _shown(x)

    layer = Traced()
    model = classifier(layer)
    layer.act = act
    with kt.TowerStrategy(2):
        fit(model)
    assert len(reasons()) == 1
    dropped, first, second = drawn[-3:]
    # What they draw while they are traced is the same on all towers.
    assert dropped == first == second


def test_an_error_of_the_step_is_raised():
    def act(x):
        raise Caught("of the user")

    model = classifier()
    layer = Traced()
    model = classifier(layer)
    layer.act = act
    with kt.TowerStrategy(2), pytest.raises(Caught, match="of the user"):
        fit(model)
