"""Layers and steps with effects or updates besides the usual ones."""

import keras
import tensorflow as tf

from keras_towers.inspection.conformance import case_models as m


class Acts(keras.layers.Layer):
    """Does what a function does."""

    def __init__(self, act=tf.identity):
        super().__init__()
        self.act = act

    def call(self, x):
        return self.act(x)


def shown(x):
    tf.print(tf.shape(x), output_stream="file:///dev/null")
    return x


def sparse(y, p):
    """Cross-entropy, the mean over the examples."""
    losses = keras.losses.sparse_categorical_crossentropy(
        y, p, from_logits=True
    )
    return tf.reduce_mean(losses)


# Keras makes this a base of a model that is given inputs and outputs, but not
# where it inherits from another in two ways.
_input = keras.Input((1,))
Functional = type(keras.Model(_input, _input))


class Stepping(Functional):
    """Trains by hand, then does more; each subclass something else."""

    @classmethod
    def made(cls, optimizer="sgd", **options):
        """A compiled classifier that trains so."""
        inner = m.mlp()
        model = cls(*inner.inputs, *inner.outputs)
        model.prepare()
        model.compile(optimizer, **options)
        return model

    def prepare(self):
        """Make what the step writes."""

    def train_step(self, data):
        x, y = data[:2]
        self.before(x)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.loss_of(y, p)
        variables = self.trainable_variables
        self.update(tape.gradient(loss, variables), variables)
        self.after(x, p)
        return {"mine": loss}

    def loss_of(self, y, p):
        return sparse(y, p)

    def update(self, grads, variables):
        self.optimizer.apply(grads, variables)

    def before(self, x):
        """A hook before the forward pass."""

    def after(self, x, p):
        """A hook after the update."""


class Both(Stepping):
    """Updates two parts, whose gradients are known before."""

    def update(self, grads, variables):
        self.optimizer.build(variables)
        super().update(grads[:2], variables[:2])
        super().update(grads[2:], variables[2:])


class Twice(Stepping):
    """Updates once more."""

    def update(self, grads, variables):
        super().update(grads, variables)
        super().update([w * 0.1 for w in variables], variables)


class ReadsItsUpdate(keras.Sequential):
    """Reads a weight that the step has already updated, as GANs do."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "norm": tf.norm(self.trainable_variables[0])}
