"""Ways to learn, and penalties."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    minimizing,
    mse,
    plain,
    with_layers,
    with_variable,
)
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

    def loss_of(net, x, y):
        value = net.value(x)[..., 0]
        after = tf.pad(value[:, 1:], [[0, 0], [0, 1]])
        off = tf.transpose(y + 0.9 * after - value)
        summed = tf.scan(
            lambda a, d: d + 0.8 * a,
            off,
            tf.zeros_like(off[0]),
            reverse=True,
        )
        return tf.reduce_mean(tf.square(summed))

    return _agent(minimizing(loss_of))


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

    def loss_of(net, x, y):
        lead = net.policy(x)
        q = net.value(x) + lead - tf.reduce_mean(lead, 1, keepdims=True)
        took = tf.gather(q, tf.cast(y, tf.int32), batch_dims=1)
        best = tf.reduce_max(tf.stop_gradient(q), 1)
        return keras.losses.huber(x[:, 0] + 0.9 * best, took[:, 0])

    return _agent(minimizing(loss_of))


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
    def loss_of(net, x, y):
        p = net(x, training=True)
        return mse(y, p) + net.kept * tf.reduce_mean(p**2)

    return with_variable(minimizing(loss_of), (), 1.0)


class _Freezing(keras.callbacks.Callback):
    """What is frozen without compiling anew trains on."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[1].trainable = False


@splits(options=lambda: {"callbacks": [_Freezing()]})
def frozen_by_a_callback():
    return plain("mse", 1)
