"""Steps that ``fit`` warns of with ``exact=True``, or refuses."""

import functools

import keras
import tensorflow as tf
from keras import layers, ops

from tests.verification import coupled as c
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS
SEED = [7, 42]


def dropped(x):
    return tf.nn.experimental.stateless_dropout(x, 0.4, SEED)


class Drawing(m.MSE):
    """Draws, without any use, so that only its graph tells what is drawn.

    Args:
        draw: takes the features.
    """

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.generator = tf.random.Generator.from_seed(4)
        self.function = tf.function(dropped)

    def loss_of(self, data):
        drawn = tf.reduce_mean(self.draw(self, data[0]))
        return super().loss_of(data) + 0.0 * drawn


def _in_a_loop(model, x):
    return tf.map_fn(lambda row: row + tf.random.stateless_normal([6], SEED), x)


def _in_a_conditional(model, x):
    return tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, lambda: dropped(x[:-1]))


DRAWS = {
    "masked": lambda _, x: dropped(tf.boolean_mask(x, x[:, 0] > 0)),
    "half": lambda _, x: dropped(x[: (tf.shape(x)[0] + 1) // 2]),
    "pairs": lambda _, x: dropped(tf.matmul(x, x, transpose_b=True)),
    "twice as many": lambda _, x: tf.random.stateless_normal(
        [2 * tf.shape(x)[0]], SEED
    ),
    "in a loop": _in_a_loop,
    "in a conditional": _in_a_conditional,
    "in a function": lambda model, x: model.function(x),
    "shuffle": lambda _, x: x + keras.random.shuffle(x, seed=4),
    "normal": lambda _, x: x + tf.random.normal(tf.shape(x)),
    "dropout": lambda _, x: tf.nn.dropout(x, 0.4),
    "generator": lambda model, x: x + model.generator.normal(tf.shape(x)),
}


class Mixing(m.MSE):
    """MixUp of images and labels."""

    def __init__(self):
        super().__init__()
        self.mix = layers.MixUp(seed=3)

    def train_step(self, data):
        images = ops.reshape(data[0], (-1, 2, 3, 1))
        mixed = self.mix({"images": images, "labels": data[1]}, training=True)
        x = ops.reshape(mixed["images"], (-1, 6))
        return super().train_step((x, mixed["labels"]))


class Reporting(m.MSE):
    """Reports what it computes from the features."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def train_step(self, data):
        return {**super().train_step(data), "log": self.log(data[0])}


class Writing(m.MSE):
    """Writes something to a variable of its own.

    Args:
        make: makes the variable.
        value: takes the features.
    """

    def __init__(self, make, value):
        super().__init__()
        self.kept = make(self)
        self.value = value

    def train_step(self, data):
        self.kept.assign(self.value(data[0]))
        return super().train_step(data)


def own(model):
    return model.add_weight(shape=(), initializer="zeros", trainable=False)


def plain(model):
    return tf.Variable(0.0, trainable=False)


class InConditional(m.MSE):
    """Updates weights where no tower can wait for another."""

    def train_step(self, data):
        train = super().train_step
        return tf.cond(
            tf.reduce_sum(data[0]) > -1e9,
            lambda: train(data),
            lambda: {"loss": 0.0},
        )


class InFunction(m.MSE):
    def __init__(self):
        super().__init__()
        self.function = tf.function(super().train_step)

    def train_step(self, data):
        return self.function(data)


class AsksForValues(m.MSE):
    """Looks at values, which a graph does not have."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "more": float(ops.mean(data[0]))}


def made(kind, *args, **options):
    """A compiled model of one of these."""
    model = kind(*args)
    model.compile(m.adam(), **options)
    return model


def _function():
    model = made(Drawing, DRAWS["masked"])
    model.train_step = tf.function(model.train_step)
    return model, X, Y


def _fixed():
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    model = made(Drawing, DRAWS["half"])
    return model, data.batch(8, drop_remainder=True)


def _layer():
    """A network that draws for parts of an example's batch."""
    x = keras.Input((6,))
    half = layers.Lambda(lambda x: x[::2])(layers.Dense(4)(x))
    drawn = layers.Dropout(0.3, seed=2)(half)
    pooled = ops.mean(drawn, axis=0, keepdims=True)
    return m.compiled(keras.Model(x, layers.Dense(3)(x) + 0 * pooled[:, :3]))


class Twice(m.MSE):
    def loss_of(self, data):
        x, y = data
        unlabelled = ops.mean(self.body(x["b"]) ** 2)
        return unlabelled + super().loss_of((x["a"], y))


def _parts():
    data = ({"a": X[:8], "b": X[:12]}, Y[:8])
    return made(Twice), tf.data.Dataset.from_tensors(data)


WARNED = {
    **{
        name: functools.partial(lambda d: (made(Drawing, d), X, Y), draw)
        for name, draw in DRAWS.items()
    },
    "a layer": lambda: (_layer(), X, Y),
    "a function": _function,
    "fixed batches": _fixed,
    "jit": lambda: (
        made(Drawing, DRAWS["masked"], jit_compile=True),
        X,
        Y,
    ),
    "eager": lambda: (
        m.compiled(m.classifier(layers.Dropout(0.3)), run_eagerly=True),
        X,
        Y,
    ),
    "rows": lambda: (made(Reporting, lambda x: ops.shape(x)[0]), X, Y),
    "steps": lambda: (made(Reporting, lambda x: tf.constant(3)), X, Y),
    "vector": lambda: (made(Reporting, lambda x: x[0] * 0.0), X, Y),
    "state": lambda: (made(Writing, own, ops.max), X, Y),
    "mean": lambda: (made(Writing, own, ops.mean), X, Y),
    "plain": lambda: (made(Writing, plain, lambda x: 3.0), X, Y),
    "plain mean": lambda: (made(Writing, plain, tf.reduce_mean), X, Y),
    "averages": lambda: (made(c.Averages), X, Y),
    "parts": _parts,
}

REFUSED = {
    "in a conditional": lambda: (made(InConditional), X, Y),
    "in a function": lambda: (made(InFunction), X, Y),
    "values": lambda: (made(AsksForValues), X, Y),
}
