"""Models whose own ``train_step`` writes state, as training scripts do."""

import keras
import tensorflow as tf

from tests.exactness import models as m
from tests.fit.step.acts import Stepping

WIDTH = m.FEATURES.shape[1]


def zeros(model, shape=(), **options):
    """A variable of a model's, which no gradient changes."""
    options = {"initializer": "zeros", "trainable": False, **options}
    return model.add_weight(shape=shape, **options)


class Writing(Stepping):
    """Writes what a step may write without asking how many examples it has."""

    def prepare(self):
        super().prepare()
        weights = self.trainable_variables
        target = m.mlp()
        target.set_weights([v.numpy() for v in weights])
        # A target network, updated by hand, that no layer tracks.
        self.__dict__["target"] = target
        self.shadow = [zeros(self, w.shape) for w in weights]
        self.counted = zeros(self, dtype="int64")
        self.seen = zeros(self, aggregation="sum")
        self.first = zeros(self, aggregation="only_first_replica")
        self.of_batches = zeros(self, (WIDTH,))

    def before(self, x):
        for weight in self.trainable_variables:
            if "bias" in weight.name:
                weight.assign(0.9 * weight)

    def after(self, x, p):
        super().after(x, p)
        target = self.__dict__["target"].trainable_variables
        for shadow, old, new in zip(
            self.shadow, target, self.trainable_variables, strict=True
        ):
            shadow.assign(0.9 * shadow + 0.1 * new)
            old.assign(0.8 * old + 0.2 * new)
        self.counted.assign_add(1)
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        self.first.assign(self.first * 0.5 + 1.0)
        mean = tf.reduce_mean(x, 0)
        self.of_batches.assign(0.7 * self.of_batches + 0.3 * mean)

    def state(self):
        return self.__dict__["target"].get_weights()


class ClippingSometimes(Stepping):
    """Clips its weights in every other step, as a Wasserstein critic."""

    def prepare(self):
        super().prepare()
        self.turns = zeros(self, dtype="int32")

    def after(self, x, p):
        def clip():
            for weight in self.trainable_variables:
                weight.assign(tf.clip_by_value(weight, -0.05, 0.05))
            return 0

        self.turns.assign_add(1)
        tf.cond(self.turns % 2 == 0, clip, lambda: 0)
        super().after(x, p)


class Native(Stepping):
    """Counters and averages in plain ``tf.Variable``s."""

    def prepare(self):
        super().prepare()
        self.steps = tf.Variable(0, trainable=False, name="steps")
        self.mean = tf.Variable(tf.zeros(WIDTH), trainable=False, name="mean")
        self.table = tf.Variable(tf.zeros([3, 2]), trainable=False)

    def after(self, x, p):
        super().after(x, p)
        self.steps.assign_add(1)
        self.mean.assign_sub(0.3 * (self.mean - tf.reduce_mean(x, 0)))
        self.table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1]))
        self.table[2, 0].assign(self.table[2, 0] + 2.0)

    def state(self):
        return [v.numpy() for v in (self.steps, self.mean, self.table)]


class Unconditional(Writing, Native):
    """Does both, in every step."""

    def state(self):
        return [*Writing.state(self), *Native.state(self)]


class Together(ClippingSometimes, Unconditional):
    """Does all of it."""


def made(kind, **options):
    """A function that builds and compiles a model, the same every time."""

    def make():
        inner = m.mlp()
        model = kind(*inner.inputs, *inner.outputs)
        model.prepare()
        model.compile(keras.optimizers.SGD(0.02), **options)
        return model

    return make
