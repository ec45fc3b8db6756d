"""Reinforcement: returns, advantages, policies."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import apply, mse
from tests.splitting.hostile.table import (
    classes,
    couples,
    dense,
    normal,
    splits,
    sub,
)


def _agent(step):
    def layers(net):
        net.policy, net.value = dense(3), dense(1)

    return sub(step, layers)


def _chosen(logits, y):
    action = tf.cast(tf.reshape(y, [-1]), tf.int32)
    return -tf.nn.sparse_softmax_cross_entropy_with_logits(action, logits)


@couples(classes)
def returns_of_the_batch():
    """REINFORCE, where the batch is one episode."""

    def step(net, x, y):
        returns = tf.cumsum(x[:, 0], reverse=True)  # here
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(_chosen(net.policy(x), y) * returns)
        return apply(net, tape, loss)

    return _agent(step)


@splits(lambda: (normal(4, 3), normal(4)))
def returns_of_each_episode():
    """Every example is an episode: advantages by a scan from its end."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            value = net.value(x)[..., 0]
            after = tf.pad(value[:, 1:], [[0, 0], [0, 1]])
            off = tf.transpose(y + 0.9 * after - value)
            summed = tf.scan(
                lambda a, d: d + 0.8 * a,
                off,
                tf.zeros_like(off[0]),
                reverse=True,
            )
            loss = tf.reduce_mean(tf.square(summed))
        return apply(net, tape, loss)

    return _agent(step)


@couples(classes)
def advantages_made_normal():
    """PPO normalizes advantages over the batch."""

    def step(net, x, y):
        off = x[:, 0] - tf.stop_gradient(net.value(x)[:, 0])
        off -= tf.reduce_mean(off)  # here
        off /= tf.math.reduce_std(off) + 1e-3  # here
        with tf.GradientTape() as tape:
            ratio = tf.exp(_chosen(net.policy(x), y) + 1.1)
            kept = tf.clip_by_value(ratio, 0.8, 1.2)
            loss = -tf.reduce_mean(tf.minimum(ratio * off, kept * off))
            loss += mse(x[:, :1], net.value(x))
        return apply(net, tape, loss)

    return _agent(step)


@splits(classes)
def advantages_made_even():
    """Dueling: the mean is over the actions of an example."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            lead = net.policy(x)
            q = net.value(x) + lead - tf.reduce_mean(lead, 1, keepdims=True)
            took = tf.gather(q, tf.cast(y, tf.int32), batch_dims=1)
            best = tf.reduce_max(tf.stop_gradient(q), 1)
            loss = keras.losses.huber(x[:, 0] + 0.9 * best, took[:, 0])
        return apply(net, tape, loss)

    return _agent(step)


@couples(classes)
def entropy_of_the_mean():
    """The entropy of the mean policy, for variety over states."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            logits = net.policy(x)
            mean = tf.reduce_mean(tf.nn.softmax(logits), 0)
            bonus = tf.reduce_sum(mean * tf.math.log(mean))  # here
            loss = bonus - tf.reduce_mean(_chosen(logits, y))
        return apply(net, tape, loss)

    return _agent(step)


@couples(classes)
def temperature_that_learns():
    """SAC: the temperature's gradient is a mean; its own update by hand."""

    def step(net, x, y):
        with tf.GradientTape(persistent=True) as tape:
            logits = net.policy(x)
            chances = tf.nn.softmax(logits)
            entropy = -tf.reduce_sum(chances * tf.math.log(chances), 1)
            heat = tf.exp(net.heat)
            loss = -tf.reduce_mean(_chosen(logits, y) + heat * entropy)
        weights = net.policy.trainable_variables
        net.optimizer.apply(tape.gradient(loss, weights), weights)
        off = tf.reduce_mean(entropy) - 0.9
        net.heat.assign(tf.maximum(net.heat - 0.9 * off, -1.0))  # here
        return {"loss": loss}

    net = _agent(step)
    net.heat = net.add_weight(shape=(), initializer="zeros", name="heat")
    return net
