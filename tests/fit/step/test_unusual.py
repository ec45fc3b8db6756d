"""Unusual steps that one device allows."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_exact
from tests.kit.sampling import sample_of
from tests.kit.training import compiled, fit, stacked

pytestmark = pytest.mark.alternate

X, Y = m.FEATURES[:13], m.LABELS[:13]
Dense = keras.layers.Dense
# The last batch has no example for one of two towers.
trained = functools.partial(fit, x=X, y=Y, batch_size=6)


def _method_of_another_object(model):
    original = type(model).train_step
    return types.MethodType(lambda self, data: original(model, data), object())


def _doubles_a_large_loss(model, data):
    logs = type(model).train_step(model, data)
    loss = logs["loss"]
    if loss > 0.5:  # AutoGraph makes a branch of it.
        loss = 2 * loss
    return {**logs, "loss": loss}


FORMS = {
    "partial": lambda m: functools.partial(type(m).train_step, m),
    "method": _method_of_another_object,
    "tf.function": lambda m: tf.function(m.train_step),
    "tf.function with a branch": lambda m: tf.function(
        functools.partial(_doubles_a_large_loss, m)
    ),
}


@pytest.mark.parametrize("form", sample_of(FORMS, 4))
def test_any_callable_is_exact(form):
    def make():
        model = compiled()()
        model.train_step = FORMS[form](model)
        return model

    assert_exact(make, trained, kt.TowerStrategy(3))


@keras.saving.register_keras_serializable()
class _Choosing(keras.layers.Layer):
    """Chooses in each round of a loop what to do with all rows."""

    def call(self, x):
        def each(k, y):
            is_even = tf.equal(k % 2, 0)
            return k + 1, tf.cond(is_even, lambda: tf.tanh(y), lambda: y * y)

        start, limit = (0, x), {"maximum_iterations": 3}
        return tf.while_loop(lambda k, _: k < 3, each, start, **limit)[1]


def test_what_branches_keep_for_their_gradients_under_xla_is_divided():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([_Choosing(), Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
        return model

    strategy = kt.TowerStrategy(3)
    assert_exact(make, trained, strategy)
    assert "computed once" not in strategy.describe()


@pytest.mark.parametrize("updates", sample_of(["once", "each", "sharded"], 3))
def test_slots_that_the_first_update_of_a_step_makes(updates):
    def step(model, data):
        logs = type(model).train_step(model, data)
        slots = model.optimizer.momentums
        norms = [tf.norm(slot.value) for slot in slots]
        for slot in slots:
            slot.assign(0.5 * slot)
        return {**logs, "momentum": tf.add_n(norms)}

    def make():
        model = compiled()()
        model.train_step = functools.partial(step, model)
        return model

    assert_exact(make, trained, kt.TowerStrategy(3, updates=updates))


def test_a_callback_may_compile_the_model_again():
    class Unfreeze(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.layers[0].trainable = True
                self.model.compile(m.momentum(), m.cross_entropy())
                self.model.make_train_function()

    make = stacked(lambda: [Dense(7, "tanh", trainable=False), Dense(3)])

    def act(model):
        return trained(model, epochs=3, callbacks=[Unfreeze()])

    assert_exact(make, act, kt.TowerStrategy(2))


def test_rows_of_a_variable_outside_of_the_towers():
    def act(model):
        history = trained(model)
        rows = tf.IndexedSlices(tf.ones((1, 7)), [1])
        model.weights[0].value.scatter_update(rows)
        return history, trained(model)

    assert_exact(compiled(), act, kt.TowerStrategy(2))


class Compiled(keras.layers.Layer):
    """Has a function of its own that XLA compiles."""

    def build(self, shape):
        self.seeds = keras.random.SeedGenerator(7)
        self.calls = tf.Variable(0.0, trainable=False)
        self.hidden = Dense(6, "tanh")
        self.hidden.build(shape)

    @tf.function(jit_compile=True)
    def call(self, x):
        self.calls.assign_add(1.0)
        kept = keras.random.dropout(self.hidden(x), 0.4, seed=self.seeds)
        # XLA draws other numbers than TensorFlow.
        shape = tf.shape(kept)
        noise = keras.random.truncated_normal(shape, seed=self.seeds)
        return kept + 0.1 * noise / self.calls


class Normalized(Compiled):
    """Has a function that needs all rows."""

    @tf.function(jit_compile=True)
    def call(self, x):
        hidden = self.hidden(x)
        shape = tf.shape(hidden)
        noise = keras.random.truncated_normal(shape, seed=self.seeds)
        return hidden - tf.reduce_mean(hidden, 0) + noise


COMPILED = {
    "convolutions in groups": lambda: [
        keras.layers.Reshape((3, 2, 4)),
        keras.layers.Conv2D(6, 2, groups=2),
        keras.layers.Flatten(),
        Dense(3),
    ],
    "draws": lambda: [Compiled(), Dense(3)],
    "computed once": lambda: [Normalized(), Dense(3)],
}


@pytest.mark.parametrize("name", sample_of(COMPILED, 4))
def test_functions_that_xla_compiles_in_a_step(name):
    x = tf.tile(X, [1, 4]).numpy()
    make = stacked(COMPILED[name], x.shape[1:])

    def act(model):
        # Towers get 2, 1 and 1 examples, of the last batch 1, 0 and 0.
        return fit(model, x=x[:5], y=Y[:5], batch_size=4)

    assert_exact(make, act, kt.TowerStrategy(3), in_graph=True)


def test_a_step_that_xla_compiles_draws_what_one_device_draws():
    make_layers = stacked(COMPILED["draws"])

    def make():
        model = make_layers()
        model.train_step = tf.function(model.train_step, jit_compile=True)
        return model

    def act(model):
        return fit(model, x=X[:12], y=Y[:12], batch_size=6)

    assert_exact(make, act, kt.TowerStrategy(2), in_graph=True)


_WIDE = np.random.default_rng(0).normal(size=(13, 1200)).astype("float32")
_CHOSEN = np.arange(1200) % 2 == 0
# The trace does not know how many entries of each example are left.
WITHOUT_WIDTH = {
    "a mask": lambda x: tf.boolean_mask(x, _CHOSEN, axis=1),
    "places": lambda x: tf.gather(x, tf.where(_CHOSEN)[:, 0], axis=1),
    "a function of Python": lambda x: tf.reshape(
        tf.numpy_function(lambda x: x[:, _CHOSEN], [x], x.dtype),
        [tf.shape(x)[0], -1],
    ),
}


class WithoutWidth(keras.Model):
    """Its first layer has a kernel that the trace knows better than its input.

    Args:
        choose: leaves some entries of each example.
    """

    def __init__(self, choose):
        super().__init__()
        self.choose, self.wide, self.last = choose, Dense(64), Dense(3)

    def call(self, x):
        return self.last(self.wide(self.choose(x)))

    def train_step(self, data):
        logs = super().train_step(data)
        kernel = self.wide.kernel
        # What is assigned has no static shape, either.
        rows = tf.boolean_mask(tf.concat([kernel, kernel], 0), _CHOSEN)
        kernel.assign(rows[tf.newaxis][0] * 0.9)
        return logs


@pytest.mark.parametrize("option", ["updates", "weights"])
@pytest.mark.parametrize("name", sample_of(WITHOUT_WIDTH, 3))
def test_a_divided_layer_whose_input_has_no_static_width(name, option):
    def make():
        keras.utils.set_random_seed(1)
        model = WithoutWidth(WITHOUT_WIDTH[name])
        model(_WIDE[:2])
        model.compile(m.momentum(), m.cross_entropy())
        return model

    fit_wide = functools.partial(trained, x=_WIDE)
    strategy = kt.TowerStrategy(3, **{option: "sharded"})
    assert_exact(make, fit_wide, strategy, tolerance=1e-4)
