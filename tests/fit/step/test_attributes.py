"""What a step keeps in Python attributes is its own tower's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.written import Stepping, made, sparse
from tests.kit.compare import assert_exact
from tests.kit.training import X, Y


class Holder:
    """An object of the user's own, which can be called."""

    def __init__(self):
        self.loss = None
        self.trail = []

    def __call__(self):
        return self.loss


class Keeping(Stepping):
    """Keeps tensors in attributes over an update, in several ways."""

    def prepare(self):
        self.cache = {}
        self.holder = Holder()

    def before(self, x):
        self.features = x
        self.cache["mean"] = tf.reduce_mean(x)
        self.holder.trail.append(tf.reduce_sum(x))

    def after(self, x, p):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            again = self(self.features, training=True)
            loss = (
                tf.reduce_mean(again**2) * (1.0 + 0.0 * self.cache["mean"])
                + 0.0 * self.holder.trail.pop()
            )
        self.holder.loss = loss
        grads = tape.gradient(loss, variables)
        self.optimizer.apply(grads, variables)
        self.last = self.holder.loss


class Counting(Stepping):
    """Trains another part in every other call, counted in Python."""

    def prepare(self):
        self.calls = 0
        self.seen = np.zeros(2)

    def train_step(self, data):
        self.calls += 1
        self.seen[1] += 1
        if self.calls % 2:
            return super().train_step(data)
        return {"mine": tf.reduce_mean(self(data[0]))}

    def state(self):
        return [self.calls, self.seen.tolist()]


class Quantizer(keras.layers.Layer):
    """Adds a loss of its own, as a vector quantizer does."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1],), name="codes")

    def call(self, x):
        self.add_loss(tf.reduce_mean((x - self.codes) ** 2))
        return x + 0.1 * self.codes


class Quantizing(Stepping):
    """Reads the losses of its layers after an update."""

    def train_step(self, data):
        x, y = data
        first, rest = self.trainable_variables[:2], self.trainable_variables[2:]
        with tf.GradientTape(persistent=True) as tape:
            loss = sparse(y, self(x, training=True))
            whole = loss + tf.add_n(self.losses)
        self.optimizer.build(self.trainable_variables)
        self.optimizer.apply(tape.gradient(whole, first), first)
        self.optimizer.apply(tape.gradient(whole, rest), rest)
        return {"mine": loss, "codes": tf.add_n(self.losses)}


def quantizing(**kwargs):
    model = Quantizing([*m.mlp(Quantizer()).layers])
    model.compile(keras.optimizers.SGD(0.02), **kwargs)
    return model


def trained(model):
    history = model.fit(
        X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history
    return history, getattr(model, "state", list)()


MAKES = {
    "keeping": made(Keeping),
    "keeping eagerly": made(Keeping, run_eagerly=True),
    "counting eagerly": made(Counting, run_eagerly=True),
    "quantizing": quantizing,
    "quantizing eagerly": lambda: quantizing(run_eagerly=True),
}


@pytest.mark.parametrize(
    "name, towers",
    [*((name, 2) for name in MAKES), ("keeping", 8), ("quantizing", 8)],
)
def test_exact(name, towers):
    assert_exact(MAKES[name], trained, kt.TowerStrategy(towers), tolerance=5e-6)


def test_attributes_end_as_on_one_device():
    model = made(Keeping, run_eagerly=True)()
    with kt.TowerStrategy(3):
        model.train_on_batch(X[:12], Y[:12])
        np.testing.assert_array_equal(model.features, X[:4])
    assert model.holder.trail == []


@pytest.mark.parametrize("where", ["cond", "while", "function"])
def test_an_update_in_a_nested_graph_is_refused(where):
    class Nested(Stepping):
        def train_step(self, data):
            x, y = data[:2]

            def update():
                with tf.GradientTape() as tape:
                    loss = sparse(y, self(x))
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(grads, self.trainable_variables)
                return loss

            if where == "cond":
                loss = tf.cond(tf.size(x) > 0, update, lambda: 0.0)
            elif where == "while":
                (loss,) = tf.while_loop(
                    lambda _: tf.constant(False), lambda _: (update(),), (0.0,)
                )
            else:
                loss = tf.function(update)()
            return {"mine": loss}

    model = made(Nested)()
    before = model.get_weights()
    with (
        pytest.raises(kt.TowerError, match="tf.cond.*outside"),
        kt.TowerStrategy(2),
    ):
        model.fit(X, Y, verbose=0)
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
