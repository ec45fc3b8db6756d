"""Builders of steps that users write by hand, after published examples.

Batches have sixteen examples; the last has one.
"""

import functools

import keras
import tensorflow as tf
from keras import layers

from tests.partition.cases.table import CASES, Case, numbers

BATCH = 16


class Hand(keras.Model):
    """A model of some parts, with a step that is written by hand.

    Args:
        step: takes the model and a batch; returns a loss of what is trained,
            or logs if it trains by itself.
        parts: layers and models by their names.
    """

    def __init__(self, step, /, **parts):
        super().__init__()
        self._by_hand = step
        for name, part in parts.items():
            setattr(self, name, part)

    def train_step(self, data):
        x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
        with tf.GradientTape() as tape:
            loss = self._by_hand(self, x, y)
            if isinstance(loss, dict):
                return loss
        down(self, tape, loss)
        return {"loss": loss}


def down(model, tape, loss, variables=None):
    variables = model.trainable_variables if variables is None else variables
    gradients = tape.gradient(loss, variables)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))


def mlp(*units, shape=(6,), **options):
    hidden = [layers.Dense(n, "tanh") for n in units[:-1]]
    return built(*hidden, layers.Dense(units[-1], **options), shape=shape)


def built(*given, shape=(6,)):
    return keras.Sequential([keras.Input(shape), *given])


def state(*shape, value=0.0, dtype="float32"):
    return tf.Variable(tf.fill(shape, tf.cast(value, dtype)), trainable=False)


def hand(data=numbers, **parts):
    """Note a step that gets a model of parts, which functions make."""

    def register(step):
        def build():
            model = Hand(step, **{name: make() for name, make in parts.items()})
            model.compile(keras.optimizers.SGD(0.05), jit_compile=False)
            return model

        return noted(step.__name__, build, data)

    return register


def fitted(data=numbers, **options):
    """Note a step of Keras's own, of a compiled model."""

    def register(build):
        return noted(build.__name__, build, data, **options)

    return register


def noted(name, build, data, **options):
    assert name not in CASES
    options = {"batch_size": BATCH, **options}
    CASES[name] = Case(build, data, functools.partial(dict, options))
    return build


def net(*units, **options):
    return functools.partial(mlp, *units, **options)


def unit(z):
    return tf.math.l2_normalize(z, -1)


def views(x):
    return x + 0.1 * tf.sin(7 * x), x * tf.cast(tf.cos(3 * x) > 0, x.dtype)


def cross_entropy(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.reshape(y, [-1]), logits
    )
