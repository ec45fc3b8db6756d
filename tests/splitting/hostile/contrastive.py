"""Losses of pairs, prototypes, margins and correlations."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import minimizing, mse, plain, stepped
from tests.splitting.hostile.table import (
    classes,
    couples,
    normal,
    rows,
    splits,
    whole,
)


def _embedded(loss, outputs=4):
    return plain(loss, outputs)


def _unit(p):
    return tf.math.l2_normalize(p, 1)


@couples(classes)
def proxies_that_have_an_anchor():
    """Proxy-anchor: the sum over examples is inside of a logarithm."""
    centres = tf.constant([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])

    def loss(y, p):
        near = tf.matmul(_unit(p), centres, transpose_b=True)
        own = tf.one_hot(tf.reshape(tf.cast(y, tf.int32), [-1]), 3)
        pull = tf.reduce_sum(own * tf.exp(-4 * (near - 0.1)), 0)
        push = tf.reduce_sum((1 - own) * tf.exp(4 * (near + 0.1)), 0)
        both = tf.math.log1p(pull) + tf.math.log1p(push)  # here
        return tf.reduce_mean(both)

    return _embedded(loss)


@couples(classes)
def centre_of_the_class():
    """Center loss with centres from the batch."""

    def loss(y, p):
        own = tf.reshape(tf.cast(y, tf.int32), [-1])
        centres = tf.math.unsorted_segment_mean(p, own, 3)  # here
        return tf.reduce_sum(tf.square(p - tf.gather(centres, own)), 1)

    return _embedded(loss)


@splits(classes)
def additive_angular_margin():
    """ArcFace, where the margin goes to the right class."""

    def loss(y, p):
        cosine = tf.clip_by_value(_unit(p), -0.99, 0.99)
        own = tf.one_hot(tf.squeeze(tf.cast(y, tf.int32), -1), 4)
        angle = tf.acos(cosine) + 0.2 * own
        return tf.nn.softmax_cross_entropy_with_logits(own, 8 * tf.cos(angle))

    return _embedded(loss)


@couples(classes)
def hardest_of_the_batch():
    def loss(y, p):
        far = tf.norm(p[:, None] - p[None] + 1e-3, axis=-1)  # here
        same = tf.cast(y == tf.transpose(y), tf.float32)  # here
        worst = tf.reduce_max(far * same, 1)
        best = tf.reduce_min(far + 1e6 * same, 1)
        return tf.nn.relu(worst - best + 0.5)

    return _embedded(loss)


@couples(lambda: (normal(6), normal(4)))
def agreement_on_the_diagonal():
    """CLIP with only the diagonal... and its softmax."""

    def loss(y, p):
        near = tf.matmul(_unit(p), _unit(y), transpose_b=True)  # here
        return -tf.linalg.diag_part(tf.nn.log_softmax(near))

    return _embedded(loss)


@splits(lambda: (normal(6), normal(4)))
def only_the_diagonal():
    """A matrix of all pairs, of which only the pairs of each are used."""

    def loss(y, p):
        near = tf.matmul(_unit(p), _unit(y), transpose_b=True)
        return -tf.linalg.diag_part(near)

    return _embedded(loss)


@couples(lambda: (normal(6), normal(4)))
def sigmoid_of_all_pairs():
    """SigLIP: a sum over all pairs."""

    def loss(y, p):
        near = tf.matmul(_unit(p), _unit(y), transpose_b=True)  # here
        sign = 2 * tf.eye(rows(p)) - 1
        return -tf.reduce_mean(tf.math.log_sigmoid(sign * near))

    return _embedded(loss)


@couples(lambda: (normal(6), normal(1)))
def views_that_are_mixed_up():
    """The second view of an example is the first one's neighbour."""

    def loss_of(net, x, y):
        both = net(tf.concat([x, tf.reverse(x, [1])], 0), training=True)
        one, two = both[::2], both[1::2]  # here
        return mse(one, tf.stop_gradient(two))

    return stepped(minimizing(loss_of), 3)


@splits(lambda: (normal(6), normal(1)))
def views_interleaved():
    """The same picks, where the two views of an example are neighbours."""

    def loss_of(net, x, y):
        views = tf.stack([x, tf.reverse(x, [1])], 1)
        both = net(tf.reshape(views, [-1, 6]), training=True)
        one, two = both[::2], both[1::2]
        return mse(one, tf.stop_gradient(two)) + mse(y, two)

    return stepped(minimizing(loss_of), 3)


@splits(lambda: ({"a": normal(6), "b": normal(6) ** 2}, whole(2)))
def margin_of_distances():
    """Siamese branches that share weights; Hadsell's loss."""
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    shared = keras.layers.Dense(3)
    off = keras.layers.Subtract()([shared(a), shared(b)])
    far = keras.ops.sqrt(keras.ops.sum(off**2, 1, keepdims=True) + 1e-3)
    model = keras.Model({"a": a, "b": b}, far)

    def loss(y, far):
        y = tf.cast(y, far.dtype)
        return y * far**2 + (1 - y) * tf.maximum(1.0 - far, 0) ** 2

    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


@couples(lambda: (normal(6), normal(1)))
def ranks_of_the_targets():
    """RankNet over all pairs of a batch."""

    def loss(y, p):
        above = tf.cast(y > tf.transpose(y), tf.float32)  # here
        off = p - tf.transpose(p)  # here
        return tf.reduce_mean(above * tf.nn.softplus(-off))

    return plain(loss, 1)


@splits(classes)
def proxies_of_classes():
    """Each example against weights of all classes, none of other examples."""
    centres = tf.constant([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])

    def loss(y, p):
        near = tf.matmul(_unit(p), centres, transpose_b=True) * 3
        own = tf.reshape(tf.cast(y, tf.int32), [-1])
        right = tf.gather(near, own, axis=1, batch_dims=1)
        return tf.reduce_logsumexp(near, 1) - right

    return _embedded(loss)
