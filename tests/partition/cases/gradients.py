"""Ways to learn: gradients, teachers, adversaries, penalties, play."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    BATCH,
    WIDTH,
    apply,
    case,
    dense,
    errors,
    gradients_of,
    layered,
    minimizing,
    mse,
    of_parts,
    rows,
    stepped,
    with_layers,
    with_variable,
)


def handed_on(change):
    """A step that changes its gradients."""

    def step(model, x, y):
        loss, grads = gradients_of(model, x, y)
        model.optimizer.apply(change(grads), model.trainable_variables)
        return {"loss": loss}

    return stepped(step)


@case(handed_on)
def clipped_by_global_norm(grads):
    return tf.clip_by_global_norm(grads, 0.01)[0]


@case(handed_on)
def checked_to_be_finite(grads):
    return [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]


@case(layered, units=4)
@tf.custom_gradient
def gradient_clipped_by_its_norm(x):
    """The gradient of an activation is clipped by its norm over the batch."""
    return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.05)


@case(stepped)
def gradient_clipped_by_example_twice(net, x, y):
    """DP-SGD without noise, whose mean is made by the batch in Python."""
    weights = net.trainable_variables
    with tf.GradientTape() as tape:
        each = errors(y, net(x, training=True))
    moves = []
    for g in tape.jacobian(each, weights):
        flat = tf.clip_by_norm(tf.reshape(g, [rows(x), -1]), 0.3, axes=[1])
        mean = tf.reduce_sum(flat, 0) / BATCH
        moves.append(tf.reshape(mean, tf.shape(g)[1:]))
    net.optimizer.apply(moves, weights)
    return {"loss": tf.reduce_mean(each)}


def _taught(after):
    """Train a student, and do something with its teacher after each step."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net.student(x)
            loss = mse(y, p) + mse(tf.stop_gradient(net.teacher(x)), p)
        logs = apply(net, tape, loss)
        after(net, x)
        return logs

    return _with_teacher(step, 1)


def _with_teacher(step, units):
    net = of_parts(step, student=units, teacher=units)
    net.teacher.trainable = False
    net.student.build((None, WIDTH))
    net.teacher.build((None, WIDTH))
    return net


def _pairs(net):
    return zip(net.teacher.weights, net.student.weights, strict=True)


@case(_taught)
def teacher_if_it_is_worse(net, x):
    """The teacher follows only where the batch's loss says so."""
    worse = tf.reduce_mean(net.student(x) ** 2) > tf.reduce_mean(x)
    for old, new in _pairs(net):
        old.assign(tf.where(worse, new, old))


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


@case()
def constrained_and_regularized():
    return with_layers(
        dense(4, kernel_constraint=_Halves(), kernel_regularizer=_Apart()),
        dense(3, kernel_constraint="unit_norm", bias_regularizer="l1l2"),
    )


class _Slower(keras.callbacks.Callback):
    """Changes what the step reads, from outside."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.kept.assign(self.model.kept * 0.7 + 0.01 * logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.02
        weights = self.model.layers[1].get_weights()
        self.model.layers[1].set_weights([w * 0.9 for w in weights])


@case(with_variable, options=lambda: {"callbacks": [_Slower()]}, initial=1.0)
@minimizing
def altered_by_a_callback(net, x, y):
    p = net(x, training=True)
    return mse(y, p) + net.kept * tf.reduce_mean(p**2)
