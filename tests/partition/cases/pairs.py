"""Steps in which examples meet: extremes, and all pairs."""

import keras
import numpy as np
import tensorflow as tf

from tests.partition.cases.table import (
    binary,
    case,
    classes,
    errors,
    minimized,
    mse,
    normal,
    plain,
    rows,
)


@case(plain)
def contrastive(y, p):
    a, b = _unit(p), _unit(p + 0.1 * y)
    s = tf.matmul(a, b, transpose_b=True) / 0.2
    at = tf.range(rows(p))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(at, s)


@case(plain, binary)
def area_under_curve(y, p):
    up = tf.boolean_mask(p, y > 0)
    down = tf.boolean_mask(p, y < 1)
    return tf.reduce_mean(tf.nn.sigmoid(down[:, None] - up[None]))


@case(plain)
def product_of_all(y, p):
    return tf.reduce_prod(tf.abs(p - y))


@case(plain)
def best_example(y, p):
    e = errors(y, p)
    return tf.gather(e, tf.argmin(e)) + tf.reduce_mean(e)


@case(plain)
def quantile_of_keras(y, p):
    e = errors(y, p)
    return keras.ops.minimum(e, keras.ops.quantile(e, 0.5))


@case(plain)
def quantized_by_constants(y, p):
    q = tf.quantization.fake_quant_with_min_max_args(p, -2.0, 2.0, 3)
    return tf.square(q - y)


@case(plain)
def by_numpy(y, p):
    top = tf.numpy_function(np.max, [p], tf.float32)
    return errors(y, p) * tf.ensure_shape(top, [])


def _unit(p):
    return tf.math.l2_normalize(p, 1)


def _pairs():
    return normal(6), normal(4)


def _near_centres(p):
    """Products with three centres of classes."""
    centres = tf.constant([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
    return tf.matmul(_unit(p), centres, transpose_b=True)


@case(plain, classes, outputs=4)
def proxies_that_have_an_anchor(y, p):
    """Proxy-anchor: the sum over examples is inside of a logarithm."""
    near = _near_centres(p)
    own = tf.one_hot(tf.reshape(tf.cast(y, tf.int32), [-1]), 3)
    pull = tf.reduce_sum(own * tf.exp(-4 * (near - 0.1)), 0)
    push = tf.reduce_sum((1 - own) * tf.exp(4 * (near + 0.1)), 0)
    both = tf.math.log1p(pull) + tf.math.log1p(push)
    return tf.reduce_mean(both)


@case(plain, classes, outputs=4)
def hardest_of_the_batch(y, p):
    far = tf.norm(p[:, None] - p[None] + 1e-3, axis=-1)
    same = tf.cast(y == tf.transpose(y), tf.float32)
    worst = tf.reduce_max(far * same, 1)
    best = tf.reduce_min(far + 1e6 * same, 1)
    return tf.nn.relu(worst - best + 0.5)


@case(plain, _pairs, outputs=4)
def only_the_diagonal(y, p):
    """A matrix of all pairs, of which only the pairs of each are used."""
    near = tf.matmul(_unit(p), _unit(y), transpose_b=True)
    return -tf.linalg.diag_part(near)


@case(minimized, outputs=3)
def views_that_are_mixed_up(net, x, y):
    """The second view of an example is the first one's neighbour."""
    both = net(tf.concat([x, tf.reverse(x, [1])], 0), training=True)
    one, two = both[::2], both[1::2]
    return mse(one, tf.stop_gradient(two))


@case(minimized, outputs=3)
def views_interleaved(net, x, y):
    """The same picks, where the two views of an example are neighbours."""
    views = tf.stack([x, tf.reverse(x, [1])], 1)
    both = net(tf.reshape(views, [-1, 6]), training=True)
    one, two = both[::2], both[1::2]
    return mse(one, tf.stop_gradient(two)) + mse(y, two)


@case(plain, classes, outputs=4)
def additive_angular_margin(y, p):
    """ArcFace, where the margin goes to the right class."""
    cosine = tf.clip_by_value(_unit(p), -0.99, 0.99)
    own = tf.one_hot(tf.squeeze(tf.cast(y, tf.int32), -1), 4)
    angle = tf.acos(cosine) + 0.2 * own
    return tf.nn.softmax_cross_entropy_with_logits(own, 8 * tf.cos(angle))
