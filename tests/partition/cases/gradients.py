"""Ways to learn: gradients, teachers, adversaries, penalties, play."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    BATCH,
    WIDTH,
    Own,
    apply,
    by_loss,
    case,
    default_loss,
    dense,
    errors,
    gradients_of,
    layered,
    minimized,
    minimizing,
    mse,
    of_parts,
    plain,
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
def signs_of_gradients(grads):
    return [tf.sign(g) for g in grads]


@case(handed_on)
def checked_to_be_finite(grads):
    return [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]


@case(minimized)
def weights_of_examples_by_loss(model, x, y):
    e = errors(y, model(x, training=True))
    return tf.reduce_sum(tf.stop_gradient(tf.nn.softmax(e)) * e)


@case(layered, units=4)
@tf.custom_gradient
def gradient_clipped_by_its_norm(x):
    """The gradient of an activation is clipped by its norm over the batch."""
    return tf.identity(x), lambda g: tf.clip_by_norm(g, 0.05)


@case(by_loss)
def python_largest_of_losses(y, p):
    """tf.maximum of two means is not a mean."""
    one, two = mse(y, p), 1.5 * tf.reduce_mean(tf.abs(y - p))
    return tf.maximum(one, two)


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


@case()
def recomputed():
    """Gradient checkpointing."""
    inner = dense(4, "tanh")
    inner.build((None, 6))
    layer = Own(lambda x: keras.remat(inner)(x))
    layer.inner = inner
    return with_layers(layer)


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


@case(minimized)
def learned_by_one_step_ahead(net, x, y):
    """MAML: the loss after one step on the same batch."""
    kernel = net.trainable_variables[0]
    with tf.GradientTape() as inner:
        inner.watch(kernel.value)
        first = mse(y, tf.reduce_sum(x @ kernel, 1, keepdims=True))
    ahead = kernel - 0.1 * inner.gradient(first, kernel.value)
    out = tf.reduce_sum(tf.tanh(x @ ahead), 1, keepdims=True)
    return mse(y, out) + 0.1 * default_loss(net, x, y)


def _chosen(logits, y):
    action = tf.cast(tf.reshape(y, [-1]), tf.int32)
    return -tf.nn.sparse_softmax_cross_entropy_with_logits(action, logits)


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


class _Freezing(keras.callbacks.Callback):
    """What is frozen without compiling anew trains on."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[1].trainable = False


@case(options=lambda: {"callbacks": [_Freezing()]})
def frozen_by_a_callback():
    return plain("mse", 1)
