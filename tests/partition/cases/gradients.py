"""Ways to learn: gradients, teachers, adversaries, penalties, play."""

import functools

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    BATCH,
    WIDTH,
    Own,
    apply,
    by_default,
    by_loss,
    case,
    classes,
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
    weighing,
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


def _moved(model, x, y, change):
    """A step on examples that were moved along their gradients."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = default_loss(model, x, y)
    moved = x + change(tape.gradient(loss, x))
    return by_default(model, moved, y)


@case(stepped)
def moved_by_gradient(model, x, y):
    return _moved(model, x, y, lambda g: 5.0 * g)


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


@case(weighing, shape=(6, 6), initial=0.1, trainable=True)
def stopped_when_all_converged(layer, x):
    """Deep equilibrium, with a test of convergence over the batch."""

    def far(z, old):
        return tf.reduce_mean(tf.abs(z - old)) > 0.05

    def body(z, old=None):
        return tf.tanh(z @ layer.kept * 0.7 + x), z

    start = (tf.tanh(x), tf.zeros_like(x))
    z, _ = tf.while_loop(far, body, start)
    return body(tf.stop_gradient(z))[0]


@case(stepped)
def gradients_projected(net, x, y):
    """PCGrad: one task's gradient is projected if the tasks disagree."""
    weights = net.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        p = net(x, training=True)
        one, two = mse(y, p), tf.reduce_mean(tf.abs(p - 1))
    first, second = tape.gradient(one, weights), tape.gradient(two, weights)
    moves = []
    for a, b in zip(first, second, strict=True):
        dot = tf.reduce_sum(a * b)
        away = tf.where(dot < 0, dot / tf.reduce_sum(b * b), 0.0)
        moves.append(a - away * b + b)
    net.optimizer.apply(moves, weights)
    return {"loss": one}


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
def teacher_that_follows(net, x):
    for old, new in _pairs(net):
        old.assign(0.9 * old + 0.1 * new)


@case(_taught)
def teacher_if_it_is_worse(net, x):
    """The teacher follows only where the batch's loss says so."""
    worse = tf.reduce_mean(net.student(x) ** 2) > tf.reduce_mean(x)
    for old, new in _pairs(net):
        old.assign(tf.where(worse, new, old))


@case()
def centred_teacher():
    """DINO: the teacher's outputs less a moving mean of them, and sharpened."""

    def step(net, x, y):
        taught = net.teacher(x)
        with tf.GradientTape() as tape:
            p = tf.nn.log_softmax(net.student(x))
            aim = tf.nn.softmax((taught - net.centre) / 0.1)
            loss = -tf.reduce_mean(tf.reduce_sum(aim * p, 1))
        logs = apply(net, tape, loss)
        mean = tf.reduce_mean(taught, 0)
        mean /= tf.norm(mean) + 0.1
        net.centre.assign(0.5 * net.centre + 0.5 * mean)
        return logs

    net = _with_teacher(step, 4)
    net.centre = net.add_weight(shape=(4,), trainable=False, name="centre")
    return net


@case(minimized)
def small_losses_only(net, x, y):
    """Co-teaching: the easier half of the batch trains the other."""
    each = errors(y, net(x, training=True))
    keep = tf.argsort(each)[: rows(x) // 2]
    return tf.reduce_mean(tf.gather(each, keep))


@case(stepped)
def adversarial_examples(model, x, y):
    """FGSM: the sign of an example's gradient does not know the batch."""
    return _moved(model, x, y, lambda g: 0.1 * tf.sign(g))


@case(stepped)
def sharpness_aware(net, x, y):
    """SAM: weights move along the gradient's direction, and back."""
    weights = net.trainable_variables
    _, slopes = gradients_of(net, x, y)
    norm = tf.linalg.global_norm(slopes)
    moves = [0.1 * g / (norm + 1e-6) for g in slopes]
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_add(move)
    loss, slopes = gradients_of(net, x, y)
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_sub(move)
    net.optimizer.apply(slopes, weights)
    return {"loss": loss}


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


_agent = functools.partial(of_parts, policy=3, value=1)


def _chosen(logits, y):
    action = tf.cast(tf.reshape(y, [-1]), tf.int32)
    return -tf.nn.sparse_softmax_cross_entropy_with_logits(action, logits)


@case(_agent, classes)
@minimizing
def advantages_made_normal(net, x, y):
    """PPO normalizes advantages over the batch."""
    off = x[:, 0] - tf.stop_gradient(net.value(x)[:, 0])
    off -= tf.reduce_mean(off)
    off /= tf.math.reduce_std(off) + 1e-3
    ratio = tf.exp(_chosen(net.policy(x), y) + 1.1)
    kept = tf.clip_by_value(ratio, 0.8, 1.2)
    loss = -tf.reduce_mean(tf.minimum(ratio * off, kept * off))
    return loss + mse(x[:, :1], net.value(x))


@case(data=classes)
def temperature_that_learns():
    """SAC: the temperature's gradient is a mean; its own update by hand."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            logits = net.policy(x)
            chances = tf.nn.softmax(logits)
            entropy = -tf.reduce_sum(chances * tf.math.log(chances), 1)
            heat = tf.exp(net.heat)
            loss = -tf.reduce_mean(_chosen(logits, y) + heat * entropy)
        logs = apply(net, tape, loss)
        off = tf.reduce_mean(entropy) - 0.9
        net.heat.assign(tf.maximum(net.heat - 0.9 * off, -1.0))
        return logs

    net = of_parts(step, policy=3)
    net.heat = net.add_weight(shape=(), trainable=False, name="heat")
    return net


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


@case()
def regularized_activity():
    """Keras divides the sum by the batch size."""
    return with_layers(dense(4, "tanh", activity_regularizer="l2"))


@case(weighing, units=4)
def added_mean(layer, x):
    layer.add_loss(tf.reduce_mean(x**2))
    return x


@case(weighing, units=4)
def added_sum(layer, x):
    layer.add_loss(0.01 * tf.reduce_sum(x**2))
    return x


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


@case(minimized)
def physics(model, x, y):
    """The residual of an equation, by derivatives of the network."""
    with tf.GradientTape() as second:
        second.watch(x)
        with tf.GradientTape() as first:
            first.watch(x)
            u = model(x, training=True)
        slope = first.gradient(u, x)
    curve = second.gradient(slope, x)
    return mse(y[:, 0], curve[:, 0] + u[:, 0]) + mse(y, u)
