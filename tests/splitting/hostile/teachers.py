"""Teachers, curricula, mixtures, adversaries and steps ahead."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    errors,
    minimizing,
    mse,
    stepped,
)
from tests.splitting.hostile.table import (
    by_design,
    couples,
    dense,
    rows,
    splits,
    sub,
)


def _taught(after, loss_of=lambda p, t: mse(t, p)):
    """A teacher that follows the student."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            p = net.student(x)
            loss = mse(y, p) + loss_of(p, tf.stop_gradient(net.teacher(x)))
        weights = net.student.trainable_variables
        net.optimizer.apply(tape.gradient(loss, weights), weights)
        after(net, x)
        return {"loss": loss}

    net = sub(step, lambda net: None)
    net.student, net.teacher = dense(1), dense(1, trainable=False)
    net.student.build((None, 6))
    net.teacher.build((None, 6))
    return net


def _pairs(net):
    return zip(net.teacher.weights, net.student.weights, strict=True)


@splits()
def teacher_that_follows():
    def after(net, x):
        for old, new in _pairs(net):
            old.assign(0.9 * old + 0.1 * new)

    return _taught(after)


@couples()
def teacher_if_it_is_worse():
    """The teacher follows only where the batch's loss says so."""

    def after(net, x):
        worse = tf.reduce_mean(net.student(x) ** 2) > tf.reduce_mean(x)  # here
        for old, new in _pairs(net):
            old.assign(tf.where(worse, new, old))

    return _taught(after)


@couples()
def centred_teacher():
    """DINO: the teacher's outputs less a moving mean of them, and sharpened."""

    def step(net, x, y):
        taught = net.teacher(x)
        with tf.GradientTape() as tape:
            p = tf.nn.log_softmax(net.student(x))
            aim = tf.nn.softmax((taught - net.centre) / 0.1)
            loss = -tf.reduce_mean(tf.reduce_sum(aim * p, 1))
        weights = net.student.trainable_variables
        net.optimizer.apply(tape.gradient(loss, weights), weights)
        mean = tf.reduce_mean(taught, 0)
        mean /= tf.norm(mean) + 0.1  # here
        net.centre.assign(0.5 * net.centre + 0.5 * mean)
        return {"loss": loss}

    net = sub(step, lambda net: None)
    net.student, net.teacher = dense(4), dense(4, trainable=False)
    net.centre = net.add_weight(shape=(4,), trainable=False, name="centre")
    return net


@couples()
def small_losses_only():
    """Co-teaching: the easier half of the batch trains the other."""

    def loss_of(net, x, y):
        each = errors(y, net(x, training=True))
        keep = tf.argsort(each)[: rows(x) // 2]  # here
        return tf.reduce_mean(tf.gather(each, keep))  # here

    return stepped(minimizing(loss_of))


@by_design()
def mixup_of_the_step():
    def step(net, x, y):
        share = keras.random.beta((rows(x), 1), 0.4, 0.4, seed=net.draws)
        order = keras.random.shuffle(tf.range(rows(x)), seed=net.draws)
        x = share * x + (1 - share) * tf.gather(x, order)
        y = share * y + (1 - share) * tf.gather(y, order)
        return by_default(net, x, y)

    net = stepped(step)
    net.draws = keras.random.SeedGenerator(7)
    return net


@splits()
def adversarial_examples():
    """FGSM: the sign of an example's gradient does not know the batch."""

    def step(net, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = mse(y, net(x, training=True))
        x = x + 0.1 * tf.sign(inner.gradient(loss, x))
        return by_default(net, x, y)

    return stepped(step)


@couples()
def sharpness_aware():
    """SAM: weights move along the gradient's direction, and back."""

    def step(net, x, y):
        weights = net.trainable_variables
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
        slopes = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(slopes)  # here
        moves = [0.1 * g / (norm + 1e-6) for g in slopes]  # here
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))  # here
        slopes = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        net.optimizer.apply(slopes, weights)
        return {"loss": loss}

    return stepped(step)


@couples()
def learned_by_one_step_ahead():
    """MAML: the loss after one step on the same batch."""

    def step(net, x, y):
        kernel = net.trainable_variables[0]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(kernel.value)
                first = mse(y, tf.reduce_sum(x @ kernel, 1, keepdims=True))
            ahead = kernel - 0.1 * inner.gradient(first, kernel.value)
            out = tf.reduce_sum(tf.tanh(x @ ahead), 1, keepdims=True)  # here
            loss = mse(y, out) + 0.1 * mse(y, net(x, training=True))
        return apply(net, tape, loss)

    return stepped(step)
