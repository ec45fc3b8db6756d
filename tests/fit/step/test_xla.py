"""XLA compiles forward and backward pass of every tower."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat
from keras_towers.fit import told
from tests.exactness import models as m
from tests.kit.compare import assert_exact, outcome, same_history, same_model
from tests.kit.training import X, Y, adam, classifier, compiled, fit

# Two batches of 16 rows.
FEW = 32
# What XLA fuses is rounded otherwise.
ROUNDING = 5e-6


def drawn(length):
    """XLA draws other numbers than TensorFlow, from the same seed."""
    return tf.random.stateless_uniform([length], seed=[1, 2])


class ShowsXla(keras.layers.Layer):
    """Scales its input, otherwise than without XLA."""

    def call(self, x):
        return x * (0.5 + drawn(x.shape[-1]))


class Acts(keras.layers.Layer):
    """Does what a function does."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def call(self, x):
        return self.act(x)


class Own(keras.Model):
    """A step of the user's own."""

    times = 1

    def train_step(self, data):
        x, y = data
        for _ in range(self.times):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Twice(Own):
    times = 2


@pytest.fixture
def reasons(monkeypatch, caplog):
    """What was logged of steps that XLA does not compile, with the levels."""
    monkeypatch.setattr(told, "_said", set())
    caplog.set_level(logging.INFO, "keras_towers")
    return lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "jit_compile" in record.getMessage()
    ]


def test_what_shows_that_xla_runs():
    compiled = tf.function(drawn, jit_compile=True)
    assert np.abs(compiled(7) - tf.function(drawn)(7)).max() > 0.1


def clipped_and_scaled():
    inner = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


def trained(model):
    rows = (m.TOKENS if model.input_shape == (None, 4) else X)[:FEW]
    return fit(model, x=rows, y=m.LABELS[:FEW])


def used(model):
    logs = model.evaluate(X[:FEW], Y[:FEW], batch_size=16, verbose=0)
    outputs = model.predict(X[:FEW], batch_size=16, verbose=0)
    return logs, outputs, trained(model)


def dense():
    return m.mlp(ShowsXla())


def own_step_with_embedding(cls=Own):
    inner = m.with_embedding()
    return cls(inner.inputs, ShowsXla()(inner.outputs[0]))


def held_once():
    return kt.ParameterServerTowerStrategy(2, ps_device="gpu")


CASES = {
    # Three towers get parts of different sizes, and have a body each.
    "uneven parts": (dense, adam, lambda: kt.TowerStrategy(3), used),
    "one body": (
        *(own_step_with_embedding, adam),
        *(lambda: kt.TowerStrategy(2), trained),
    ),
    # XLA does not use variables of other devices: it is given values.
    "held once": (dense, clipped_and_scaled, held_once, trained),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_one_device_with_xla(case, reasons):
    build, optimizer, strategy, act = CASES[case]
    make = compiled(build, optimizer, metrics=lambda: None, jit_compile=True)
    assert_exact(make, act, strategy(), tolerance=ROUNDING)
    assert reasons() == []


def image_classifier():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Reshape((6, 1)),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def test_what_towers_write(reasons):
    """Moving statistics and metrics, in two calls of ``fit``."""

    def act(model):
        first = trained(model)
        return first, fit(model, x=X[:16], y=Y[:16])

    without, xla = (
        outcome(
            compiled(image_classifier, adam, jit_compile=jit),
            act,
            kt.TowerStrategy(2),
        )
        for jit in (False, True)
    )
    for found, wanted in zip(xla.returned, without.returned, strict=True):
        same_history(found, wanted, ROUNDING)
    same_model(xla.model, without.model, ROUNDING)
    assert reasons() == []


def _asks(x):
    return x * (1 + 0 * kt.current_tower().index)


def test_what_towers_draw(reasons):
    """XLA draws other numbers; all bodies draw those of their tower."""

    def build(act):
        keras.utils.set_random_seed(1)
        return m.mlp(keras.layers.Dropout(0.4, seed=3), Acts(act))

    one, each = (
        outcome(
            compiled(lambda act=act: build(act), adam, jit_compile=True),
            trained,
            kt.TowerStrategy(2),
        )
        for act in (tf.identity, _asks)
    )
    same_history(each.returned, one.returned, ROUNDING)
    same_model(each.model, one.model, ROUNDING)
    assert reasons() == []


def _strings(x):
    number = tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))
    return x + 0 * tf.reshape(number, tf.shape(x))


def _shown(x):
    tf.print("x", output_stream="file:///dev/null")
    return x


def _exchanged(x):
    return x + 0 * tf.reduce_mean(kt.gather(x))


def _fails(x):
    if compat.in_xla_context(compat.get_default_graph()):
        raise ValueError("not for XLA")
    return x


FALLS_BACK = {
    "the step uses what XLA does not have: AsString": _strings,
    "the step uses what XLA does not have: PrintV2": _shown,
    "the step exchanges values with other towers": _exchanged,
    "the step fails in a function (ValueError": _fails,
}


@pytest.mark.parametrize("reason", FALLS_BACK)
def test_without_xla_where_it_cannot(reason, reasons):
    """Nothing is drawn or written by a trace that is dropped."""

    def build():
        layers = keras.layers.Dropout(0.4, seed=3), Acts(FALLS_BACK[reason])
        return m.mlp(keras.layers.BatchNormalization(), *layers)

    without, xla = (
        outcome(
            compiled(build, adam, jit_compile=jit), trained, kt.TowerStrategy(2)
        )
        for jit in (False, True)
    )
    same_history(xla.returned, without.returned, tolerance=0)
    same_model(xla.model, without.model, tolerance=0)
    ((level, said),) = reasons()
    assert level == "WARNING"
    assert said.startswith("jit_compile is off for training of 'sequential")
    assert reason in said


@pytest.mark.parametrize(
    "options, cls, reason",
    [
        ({}, Twice, "calls optimizers several times"),
        ({"random": "global"}, Own, "draws its own rows of random numbers"),
    ],
)
def test_a_step_that_cannot_be_cut(options, cls, reason, reasons):
    build = functools.partial(own_step_with_embedding, cls)
    model = compiled(build, jit_compile=True)()
    with kt.TowerStrategy(2, **options):
        trained(model)
    ((level, said),) = reasons()
    assert level == "WARNING"
    assert said.endswith(f"the step {reason}")


def test_towers_that_do_not_wait(reasons):
    model = classifier(jit_compile=True)
    with kt.AsyncTowerStrategy(2):
        trained(model)
    ((level, said),) = reasons()
    assert level == "WARNING"
    assert said.endswith("AsyncTowerStrategy trains without XLA")


def test_auto_is_what_it_is_without_a_strategy(reasons, monkeypatch):
    """On a machine with GPUs Keras turns it on; nobody has asked for it."""
    devices = [tf.config.PhysicalDevice("GPU:0", "GPU")]
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: devices
    )
    with kt.TowerStrategy(2):
        model = classifier(Acts(_shown))
        assert model.jit_compile is True
        trained(model)
    ((level, said),) = reasons()
    assert level == "INFO"
    assert said.endswith("PrintV2")
    monkeypatch.undo()
    with kt.TowerStrategy(2):
        assert classifier().jit_compile is False


class WithFunction(keras.layers.Layer):
    """Reads a variable in a function whose trace all steps share."""

    def build(self, shape):
        self.scale = tf.Variable(2.0, trainable=False)

    @tf.function
    def scaled(self, x):
        return x * self.scale

    def call(self, x):
        return self.scaled(x)


def test_functions_of_the_model_are_not_left_with_what_xla_got(reasons):
    def act(model):
        data = (X[:FEW], Y[:FEW])
        history = fit(model, validation_data=data)
        model.evaluate(*data, verbose=0)
        return history

    def built():
        keras.utils.set_random_seed(1)
        inputs = keras.Input(X.shape[1:])
        return keras.Sequential([inputs, WithFunction(), keras.layers.Dense(4)])

    make = compiled(built, jit_compile=True)
    assert_exact(make, act, kt.TowerStrategy(2), tolerance=ROUNDING)
    assert "in a function of its own" in reasons()[0][1]
