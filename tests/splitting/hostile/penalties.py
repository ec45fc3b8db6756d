"""Constraints, regularizers, losses of layers, callbacks."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    mse,
    plain,
    with_layers,
    with_variable,
)
from tests.splitting.hostile.table import (
    couples,
    dense,
    splits,
)

WIDTH = 6


class _Halves(keras.constraints.Constraint):
    """Weights are kept under half of the largest one."""

    def __call__(self, w):
        top = tf.reduce_max(tf.abs(w))
        return tf.clip_by_value(w, -top / 2, top / 2)


class _Apart(keras.regularizers.Regularizer):
    """Columns of a kernel are to be orthogonal."""

    def __call__(self, w):
        gram = tf.matmul(w, w, transpose_a=True)
        return 0.1 * tf.reduce_sum(tf.square(gram - tf.eye(4)))


@splits()
def constrained_and_regularized():
    return with_layers(
        dense(4, kernel_constraint=_Halves(), kernel_regularizer=_Apart()),
        dense(3, kernel_constraint="unit_norm", bias_regularizer="l1l2"),
    )


@splits()
def regularized_activity():
    """Keras divides the sum by the batch size."""
    return with_layers(dense(4, "tanh", activity_regularizer="l2"))


class _Decorrelated(keras.regularizers.Regularizer):
    """DeCov: a penalty of the covariance of activations."""

    def __call__(self, h):
        off = h - tf.reduce_mean(h, 0)  # here
        cross = tf.matmul(off, off, transpose_a=True)  # here
        return 0.1 * tf.reduce_sum(tf.square(cross))  # here


@couples()
def regularized_covariance():
    return with_layers(dense(4, "tanh", activity_regularizer=_Decorrelated()))


class _Added(keras.layers.Layer):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def call(self, x):
        self.add_loss(self.of(x))
        return x


@splits()
def added_mean():
    return with_layers(dense(4), _Added(lambda x: tf.reduce_mean(x**2)))


@couples()
def added_sum():
    layer = _Added(lambda x: 0.01 * tf.reduce_sum(x**2))  # here
    return with_layers(dense(4), layer)


@couples()
def added_norm():
    return with_layers(dense(4), _Added(lambda x: 0.1 * tf.norm(x)))  # here


@splits()
def added_of_weights():
    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(WIDTH, 4), name="w")

        def call(self, x):
            self.add_loss(0.1 * tf.norm(self.w))
            return x @ self.w

    return with_layers(Layer())


class _Slower(keras.callbacks.Callback):
    """Changes what the step reads, from outside."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.kept.assign(self.model.kept * 0.7 + 0.01 * logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.02
        weights = self.model.layers[1].get_weights()
        self.model.layers[1].set_weights([w * 0.9 for w in weights])


@splits(options=lambda: {"callbacks": [_Slower()]})
def altered_by_a_callback():
    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net(x, training=True)
            loss = mse(y, p) + net.kept * tf.reduce_mean(p**2)
        return apply(net, tape, loss)

    return with_variable(step, (), 1.0)


class _Freezing(keras.callbacks.Callback):
    """What is frozen without compiling anew trains on."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[1].trainable = False


@splits(options=lambda: {"callbacks": [_Freezing()]})
def frozen_by_a_callback():
    return plain("mse", 1)
