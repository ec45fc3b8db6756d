"""XLA compiles forward and backward pass of every tower."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat
from tests.exactness import models as m
from tests.fit.step.acts import Acts, Stepping, Twice, shown
from tests.kit.compare import assert_exact, assert_same, outcome
from tests.kit.long import long_but, some_of
from tests.kit.training import X, Y, adam, classifier, compiled, fit, stacked

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


@pytest.fixture
def reasons(logged):
    """What was logged of steps that XLA does not compile, with the levels."""
    return lambda: logged("jit_compile")


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


def own_step_with_embedding(cls=Stepping):
    inner = m.with_embedding()
    return cls(*inner.inputs, *map(ShowsXla(), inner.outputs))


class Noisy(keras.layers.Layer):
    """Adds numbers drawn for each row, also a few less than a group of them."""

    def build(self, shape):
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        for draw in keras.random.normal, keras.random.uniform:
            x = x + draw((keras.ops.shape(x)[0], 3, 1), seed=self.seed)[:, 0]
        shape = 4, keras.ops.shape(x)[0]
        noise = keras.random.truncated_normal(shape, seed=self.seed)
        return x + noise[0][:, None]


def noisy():
    keras.utils.set_random_seed(1)
    return m.mlp(dropout(), Noisy(), ShowsXla())


def held_once():
    return kt.ParameterServerTowerStrategy(2, ps_device="gpu")


CASES = {
    "one body": (
        *(own_step_with_embedding, adam),
        *(lambda: kt.TowerStrategy(2), trained),
    ),
    # Towers draw their rows of what XLA draws for the batch.
    "draws": (noisy, adam, lambda: kt.TowerStrategy(2), used),
    # Three of them get parts of different sizes, and have a body each.
    "draws, uneven": (noisy, adam, lambda: kt.TowerStrategy(3), trained),
    # XLA does not use variables of other devices: it is given values.
    "held once": (dense, clipped_and_scaled, held_once, trained),
}


# Towers of one size have one body elsewhere here, too.
SHOWN = ("draws, uneven", "held once")


@pytest.mark.parametrize("case", long_but(SHOWN.__contains__, CASES))
def test_the_same_as_one_device_with_xla(case, reasons):
    build, optimizer, strategy, act = CASES[case]
    make = compiled(build, optimizer, metrics=lambda: None, jit_compile=True)
    assert_exact(make, act, strategy(), tolerance=ROUNDING, in_graph=True)
    assert reasons() == []


def on_two_towers(way, *layers, act=trained, **options):
    """A model with layers of some classes, of which the last one acts."""
    make = stacked(
        lambda: [
            Dense(7, "tanh"),
            *(layer() for layer in layers),
            Acts(way),
            Dense(3),
        ],
        optimizer=adam,
        **{"jit_compile": True, **options},
    )
    return outcome(make, act, kt.TowerStrategy(2))


Dense = keras.layers.Dense
dropout = functools.partial(keras.layers.Dropout, 0.4, seed=3)
norm = functools.partial(keras.layers.BatchNormalization, momentum=0.5)


def test_what_towers_write(reasons):
    """Moving statistics and metrics."""
    found = on_two_towers(tf.identity, norm, act=used)
    without = {"jit_compile": False, "run_eagerly": True}
    wanted = on_two_towers(tf.identity, norm, act=used, **without)
    assert_same(found, wanted, ROUNDING)
    assert reasons() == []


def _asks(x):
    return x * (1 + 0 * kt.current_tower().index)


def test_what_towers_draw(reasons):
    """XLA draws other numbers; all bodies draw those of their tower."""
    one, each = (on_two_towers(way, dropout) for way in (tf.identity, _asks))
    assert_same(each, one, ROUNDING)
    assert reasons() == []


def _strings(x):
    number = tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))
    return x + 0 * tf.reshape(number, tf.shape(x))


def _fails(x):
    if compat.in_xla_context(compat.get_default_graph()):
        raise ValueError("not for XLA")
    return x


@pytest.mark.parametrize(
    "act, reason",
    some_of(
        [
            (_strings, "uses what XLA does not have: AsString"),
            (shown, "has effects: PrintV2"),
            (_fails, "fails in a function (ValueError"),
        ]
    ),
)
def test_without_xla_where_it_cannot(act, reason, reasons):
    found = on_two_towers(act, dropout, norm)
    ((level, said),) = reasons()
    assert level == "WARNING"
    assert said.startswith("jit_compile is off for training of 'sequential")
    assert f"the step {reason}" in said
    if act is _strings:
        # Nothing is drawn or written by a trace that is dropped.
        wanted = on_two_towers(act, dropout, norm, jit_compile=False)
        assert_same(found, wanted, tolerance=0)


@pytest.mark.parametrize(
    "strategy, cls, reason",
    some_of(
        [
            (
                lambda: kt.TowerStrategy(2),
                *(Twice, "the step uses variables after its update"),
            ),
            (
                lambda: kt.AsyncTowerStrategy(2),
                *(Stepping, "AsyncTowerStrategy trains without XLA"),
            ),
        ]
    ),
)
def test_a_step_that_cannot_be_cut(strategy, cls, reason, reasons):
    build = functools.partial(own_step_with_embedding, cls)
    model = compiled(build, jit_compile=True)()
    with strategy():
        trained(model)
    ((level, said),) = reasons()
    assert level == "WARNING"
    assert said.endswith(reason)


def test_auto_is_what_it_is_without_a_strategy(reasons, monkeypatch):
    """On a machine with GPUs Keras turns it on; nobody has asked for it."""
    devices = [tf.config.PhysicalDevice("GPU:0", "GPU")]
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: devices
    )
    with kt.TowerStrategy(2):
        model = classifier(Acts(shown))
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
        return fit(model, validation_data=(X[:FEW], Y[:FEW]))

    make = stacked(lambda: [WithFunction(), Dense(4)], jit_compile=True)
    strategy = kt.TowerStrategy(2)
    assert_exact(make, act, strategy, tolerance=ROUNDING, in_graph=True)
    assert "in a function of its own" in reasons()[0][1]
