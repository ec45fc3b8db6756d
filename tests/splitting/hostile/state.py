"""What layers, metrics, callbacks and constraints keep from step to step."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    apply,
    by_default,
    count,
    mse,
    with_layers,
    with_variable,
)
from tests.splitting.hostile.table import (
    by_design,
    couples,
    dense,
    normal,
    rows,
    splits,
    whole,
)

WIDTH = 6


class _Kept(keras.layers.Layer):
    """A layer with one weight that is not trained."""

    def __init__(self, use, shape=(WIDTH,), initial=0.0, **options):
        super().__init__()
        self.use = use
        self.kept = self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(initial),
            trainable=False,
            name="kept",
            **options,
        )

    def call(self, x, training=False):
        return self.use(self, x)


@couples()
def centred_by_a_moving_mean():
    """The mean is the one before this batch; towers read their own parts."""

    def use(layer, x):
        out = x - layer.kept  # here
        layer.kept.assign(0.9 * layer.kept + 0.1 * tf.reduce_mean(x, 0))
        return out

    return with_layers(_Kept(use))


@couples()
def centred_by_the_new_mean():
    """The mean that is used has this batch in it already."""

    def use(layer, x):
        layer.kept.assign(0.9 * layer.kept + 0.1 * tf.reduce_mean(x, 0))
        return tf.tanh(x - layer.kept)  # here

    return with_layers(_Kept(use))


@couples()
def scaled_by_the_largest():
    """Observers of quantization: a moving maximum."""

    def use(layer, x):
        layer.kept.assign(  # here
            tf.maximum(layer.kept, tf.reduce_max(tf.abs(x), 0))  # here
        )
        return x / layer.kept  # here

    return with_layers(_Kept(use, initial=1e-3))


@splits()
def counted_steps_dim_the_layer():
    """A count of steps, in a layer, fades an input in."""

    def use(layer, x):
        layer.kept.assign_add(1.0)
        return x * tf.minimum(layer.kept / 5.0, 1.0)

    return with_layers(_Kept(use, ()))


@couples()
def counted_examples_dim_the_layer():
    """A count of examples does."""

    def use(layer, x):
        layer.kept.assign_add(count(x))  # here
        return x * tf.minimum(layer.kept / 60.0, 1.0)  # here

    return with_layers(_Kept(use, ()))


@couples()
def variance_by_welford():
    """Mean and count, merged by Chan's formula."""

    def step(net, x, y):
        n, total = count(x), net.kept[0]
        mean = tf.reduce_mean(x)
        new = net.kept[1] + (mean - net.kept[1]) * n / (n + total)  # here
        net.kept.assign(tf.stack([total + n, new]))  # here
        return by_default(net, x, y)

    return with_variable(step, (2,))


@couples()
def last_example_is_kept():
    def step(net, x, y):
        net.kept.assign(x[-1])  # here
        return by_default(net, x - net.kept, y)

    return with_variable(step, (WIDTH,))


@couples()
def table_of_the_examples():
    """An embedding of each example is kept under its number."""

    def step(net, x, y):
        place = tf.cast(tf.abs(x[:, 0]) * 10, tf.int32) % 5
        net.kept.assign(
            tf.tensor_scatter_nd_update(  # here
                net.kept, place[:, None], tf.reduce_mean(x, 1)
            )
        )
        return by_default(net, x, y)

    return with_variable(step, (5,))


@couples(lambda: (normal(6), whole(3, 1)))
def histogram_of_classes():
    """Counts of labels weigh the loss of the batches after."""

    def step(net, x, y):
        label = tf.cast(y[:, 0], tf.int32)
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(
                label, net(x, training=True)
            )
            weight = tf.gather(1.0 / (net.kept + 1.0), label)
            loss = tf.reduce_mean(weight * each)
        net.kept.assign_add(tf.reduce_sum(tf.one_hot(label, 3), 0))  # here
        return apply(net, tape, loss)

    return with_variable(step, (3,), outputs=3)


@couples(lambda: (normal(6), whole(3, 1)))
def shares_seen_so_far():
    """A moving mean of shares of labels corrects the logits."""

    def step(net, x, y):
        label = tf.cast(y[:, 0], tf.int32)
        with tf.GradientTape() as tape:
            logits = net(x, training=True) + tf.math.log(net.kept)  # here
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            loss = tf.reduce_mean(each)
        share = tf.reduce_mean(tf.one_hot(label, 3), 0)
        net.kept.assign(0.8 * net.kept + 0.2 * share)
        return apply(net, tape, loss)

    return with_variable(step, (3,), 0.3, outputs=3)


@couples()
def loss_against_the_last_one():
    """Stops learning once the loss has grown."""

    def step(net, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, net(x, training=True))
            scaled = loss * tf.cast(loss < net.kept, tf.float32)  # here
        net.kept.assign(loss)
        return apply(net, tape, scaled)

    return with_variable(step, (), 100.0)


class _Spectral(keras.layers.Layer):
    """A dense layer whose weight is divided by its largest singular value."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4), name="w")
        self.u = self.add_weight(shape=(1, 4), trainable=False, name="u")

    def call(self, x, training=False):
        v = tf.math.l2_normalize(self.u @ tf.transpose(self.w))
        u = tf.math.l2_normalize(v @ self.w)
        sigma = tf.reduce_sum(v @ self.w @ tf.transpose(u))
        if training:
            self.u.assign(tf.stop_gradient(u))
        return x @ (self.w / sigma)


@splits()
def spectral_by_hand():
    return with_layers(_Spectral())


@splits()
def spectral_of_keras():
    return with_layers(keras.layers.SpectralNormalization(dense(4)))


@by_design()
def renormalized_batch():
    return with_layers(dense(4), keras.layers.BatchNormalization(), dense(3))


class _Renorm(keras.layers.Layer):
    """Batch statistics by hand, with moving averages, as many write it."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], trainable=False, name="m")

    def call(self, x, training=False):
        mean, variance = tf.nn.moments(x, [0])
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return (x - mean) * tf.math.rsqrt(variance + 0.1)  # here


@couples()
def normalized_by_hand():
    return with_layers(dense(4), _Renorm())


class _Ghost(keras.layers.Layer):
    """TabNet's ghost normalization: over pieces of a fixed size."""

    def call(self, x):
        def each(part):
            mean, variance = tf.nn.moments(part, [0])  # here
            return (part - mean) * tf.math.rsqrt(variance + 0.1)  # here

        half = rows(x) // 2
        return tf.concat([each(x[:half]), each(x[half:])], 0)  # here


@couples()
def normalized_by_ghosts():
    return with_layers(dense(4), _Ghost())


@splits()
def normalized_by_groups():
    return with_layers(
        dense(4),
        keras.layers.GroupNormalization(2),
        keras.layers.UnitNormalization(),
    )
