"""More losses: sizes as numbers, and operations on the wrong axis."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    binary,
    by_design,
    classes,
    differs,
    plain,
    proven,
    unproven,
)


def count(t):
    return tf.cast(tf.shape(t)[0], tf.float32)


def errors(y, p):
    return tf.reduce_mean(tf.square(p - y), -1)


@differs()
def count_halved():
    def loss(y, p):
        n = tf.shape(p)[0] // 2  # here
        n = tf.cast(n, tf.float32)  # here
        return tf.reduce_sum(errors(y, p)) / n

    return plain(loss)


@differs()
def logarithm_of_count():
    def loss(y, p):
        return errors(y, p) * tf.math.log(count(p))  # here

    return plain(loss)


@differs()
def count_of_at_least_eight():
    def loss(y, p):
        n = tf.maximum(count(p), 8.0)  # here
        return tf.reduce_sum(errors(y, p)) / n

    return plain(loss)


@proven()
def size_and_width():
    def loss(y, p):
        n = tf.cast(tf.size(p), tf.float32)
        return tf.reduce_sum(tf.square(p - y)) / n * 3.0

    return plain(loss)


@differs()
def only_if_large():
    def loss(y, p):
        e = errors(y, p)
        return tf.cond(
            tf.shape(p)[0] > 6,  # here
            lambda: e,
            lambda: 0.1 * e,  # here
        )

    return plain(loss)


@differs()
def weighed_by_position():
    def loss(y, p):
        return errors(y, p) * tf.range(count(p))  # here

    return plain(loss)


@differs()
def weighed_by_linspace():
    def loss(y, p):
        w = tf.linspace(0.0, 1.0, tf.shape(p)[0])  # here
        return errors(y, p) * w  # here

    return plain(loss)


@differs()
def off_the_diagonal():
    def loss(y, p):
        g = tf.matmul(p, p, transpose_b=True)  # here
        return tf.reduce_mean(g * (1 - tf.eye(tf.shape(p)[0])))  # here

    return plain(loss)


@unproven()
def diagonal_part():
    def loss(y, p):
        g = tf.matmul(p, p, transpose_b=True)  # here
        return tf.reduce_mean(tf.linalg.diag_part(g))

    return plain(loss)


@unproven()
def scattered_to_itself():
    def loss(y, p):
        at = tf.range(tf.shape(p)[0])[:, None]
        q = tf.scatter_nd(at, p, tf.shape(p))  # here
        return tf.square(q - y)

    return plain(loss)


@differs()
def gathered_by_order_of_targets():
    def loss(y, p):
        q = tf.gather(p, tf.argsort(y[:, 0]))  # here
        return tf.square(q - y)

    return plain(loss)


@differs()
def gathered_backwards():
    def loss(y, p):
        n = tf.shape(p)[0]
        q = tf.gather(p, n - 1 - tf.range(n))  # here
        return tf.square(q - y)

    return plain(loss)


@differs()
def reverse_sequence_of_examples():
    def loss(y, p):
        lengths = tf.fill([3], tf.shape(p)[0])
        q = tf.reverse_sequence(p, lengths, seq_axis=0, batch_axis=1)  # here
        return tf.square(q - y)

    return plain(loss)


@proven()
def reverse_sequence_of_features():
    def loss(y, p):
        lengths = tf.fill([tf.shape(p)[0]], 2)
        q = tf.reverse_sequence(p, lengths, seq_axis=1, batch_axis=0)
        return tf.square(q - y)

    return plain(loss)


@differs()
def least_squares():
    def loss(y, p):
        g = tf.matmul(p, p, transpose_a=True) + tf.eye(3)  # here
        b = tf.linalg.solve(g, tf.matmul(p, y, transpose_a=True))  # here
        return tf.square(p @ b - y)

    return plain(loss)


@differs()
def singular_values():
    def loss(y, p):
        s = tf.linalg.svd(p, compute_uv=False)  # here
        return tf.reduce_sum(s) + tf.reduce_mean(tf.square(p - y))

    return plain(loss)


@proven()
def solved_for_each():
    def loss(y, p):
        g = p[:, :, None] * p[:, None, :] + tf.eye(3)
        return tf.square(tf.linalg.solve(g, p[:, :, None])[..., 0] - y)

    return plain(loss)


@differs()
def convolved_over_examples():
    def loss(y, p):
        q = tf.nn.conv1d(p[None], tf.ones([3, 3, 3]) / 9, 1, "SAME")  # here
        return tf.square(q[0] - y)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def pooled_over_examples():
    def loss(y, p):
        q = tf.nn.max_pool1d(p[None], 2, 1, "SAME")  # here
        return tf.square(q[0] - y)

    return plain(lambda y, p: tf.reduce_mean(loss(y, p)))


@differs()
def response_normalized_over_examples():
    def loss(y, p):
        q = tf.transpose(p)[:, None, None, :]
        q = tf.nn.local_response_normalization(q, 2)  # here
        return tf.square(tf.transpose(q[:, 0, 0, :]) - y)

    return plain(loss)


@differs()
def fourier_over_examples():
    def loss(y, p):
        f = tf.signal.fft(tf.cast(tf.transpose(p - y), tf.complex64))  # here
        return tf.reduce_mean(tf.abs(f))

    return plain(loss)


@proven()
def fourier_of_features():
    def loss(y, p):
        f = tf.signal.rfft(p - y)
        return tf.reduce_mean(tf.abs(f), -1)

    return plain(loss)


@differs()
def product_of_all():
    return plain(
        lambda y, p: tf.reduce_prod(tf.abs(p - y))  # here
    )


@differs()
def any_above():
    def loss(y, p):
        far = tf.reduce_any(tf.abs(p - y) > 3)  # here
        return errors(y, p) * (1 + tf.cast(far, tf.float32))

    return plain(loss)


@differs()
def best_example():
    def loss(y, p):
        e = errors(y, p)
        return tf.gather(e, tf.argmin(e)) + tf.reduce_mean(e)  # here

    return plain(loss)


@differs()
def histogram_matched():
    def loss(y, p):
        h = tf.histogram_fixed_width(y, [-2.0, 2.0], 4)  # here
        h = tf.cast(h, tf.float32) / count(y)
        return errors(y, p) * tf.reduce_max(h)  # here

    return plain(loss)


@differs(classes)
def square_of_class_sums():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        s = tf.math.unsorted_segment_sum(p, y, 3) / count(p)
        return tf.reduce_mean(tf.square(s))  # here

    return plain(loss)


@proven(classes)
def class_sums():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        s = tf.math.unsorted_segment_sum(tf.square(p), y, 3) / count(p)
        return tf.reduce_sum(s * tf.constant([[1.0], [2.0], [3.0]]))

    return plain(loss)


@proven(classes)
def confusion():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        c = tf.math.confusion_matrix(y, tf.argmax(p, 1), 3, dtype=tf.float32)
        e = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
        return tf.reduce_mean(e) + tf.linalg.trace(c) / count(p)

    return plain(loss)


@differs(classes)
def partitioned():
    def loss(y, p):
        y = tf.cast(tf.reshape(y, [-1]), tf.int32)
        parts = tf.dynamic_partition(p, y, 3)  # here
        return sum(tf.reduce_mean(tf.square(q)) for q in parts)

    return plain(loss)


@differs()
def scanned():
    def loss(y, p):
        s = tf.scan(lambda a, b: 0.5 * a + b, p)  # here
        return tf.square(s - y)

    return plain(loss)


@unproven()
def folded():
    def loss(y, p):
        s = tf.foldl(
            lambda a, b: a + tf.square(b),
            p - y,
            tf.zeros([3]),  # here
        )
        return tf.reduce_mean(s) / count(p)

    return plain(loss)


@unproven()
def mapped():
    return plain(lambda y, p: tf.map_fn(lambda a: tf.nn.softmax(a), p) - y)


@unproven()
def vectorized():
    def one(a):
        return tf.reduce_sum(tf.square(a - tf.reduce_mean(a)))

    return plain(lambda y, p: tf.vectorized_map(one, p - y))


@differs()
def until_all_are_small():
    def loss(y, p):
        q = tf.while_loop(
            lambda q: tf.reduce_max(tf.abs(q)) > 0.3,  # here
            lambda q: (0.8 * q,),
            (p - y,),
        )[0]
        return tf.square(q)

    return plain(loss)


@proven()
def three_rounds():
    def loss(y, p):
        _, q = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, q: (i + 1, tf.tanh(q)),
            (0, p - y),
        )
        return tf.square(q)

    return plain(loss)


@proven()
def reversed_gradient():
    @tf.custom_gradient
    def reverse(p):
        return p, lambda dy: -0.5 * dy

    return plain(lambda y, p: tf.square(reverse(p) - y))


@differs()
def gradient_by_count():
    @tf.custom_gradient
    def quieter(p):
        return p, lambda dy: dy / count(p)

    return plain(lambda y, p: tf.square(quieter(p) - y))


@differs()
def gradient_of_batch():
    @tf.custom_gradient
    def shared(p):
        def grad(dy):
            m = tf.reduce_mean(dy, 0, keepdims=True)
            return tf.square(m) + tf.zeros_like(dy)  # here

        return p, grad

    return plain(lambda y, p: tf.square(shared(p) - y))


@differs()
def quantized_by_range():
    def loss(y, p):
        q = tf.quantization.fake_quant_with_min_max_vars(
            p,
            tf.reduce_min(p),  # here
            tf.reduce_max(p),
            3,  # here
        )
        return tf.square(q - y)

    return plain(loss)


@unproven()
def quantized_by_constants():
    def loss(y, p):
        q = tf.quantization.fake_quant_with_min_max_args(p, -2.0, 2.0, 3)
        return tf.square(q - y)

    return plain(loss)


@differs(binary)
def tversky_of_keras():
    return plain(keras.losses.Tversky())


@differs(binary)
def dice_of_keras():
    return plain(keras.losses.Dice())


@differs(classes)
def circle_of_keras():
    return plain(keras.losses.Circle())


@proven(binary)
def focal_of_keras():
    return plain(keras.losses.BinaryFocalCrossentropy(from_logits=True))


@differs()
def contrastive():
    def loss(y, p):
        a = tf.nn.l2_normalize(p, -1)
        b = tf.nn.l2_normalize(p + 0.1 * y, -1)
        s = tf.matmul(a, b, transpose_b=True) / 0.2  # here
        at = tf.range(tf.shape(p)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(at, s)

    return plain(loss)


@differs()
def kernel_distance():
    def loss(y, p):
        def kernel(a, b):
            d = tf.reduce_sum(tf.square(a[:, None] - b[None]), -1)  # here
            return tf.reduce_mean(tf.exp(-d))

        z = tf.concat([y, y, y], 1)
        return kernel(p, p) + kernel(z, z) - 2 * kernel(p, z)

    return plain(loss)


@differs()
def barlow_twins():
    def loss(y, p):
        q = p * 0.5 + y
        c = tf.matmul(p, q, transpose_a=True) / count(p)
        return tf.reduce_sum(tf.square(c - tf.eye(3)))  # here

    return plain(loss)


@differs()
def correlation():
    def loss(y, p):
        a = p - tf.reduce_mean(p)  # here
        b = y - tf.reduce_mean(y)  # here
        return 1 - tf.reduce_mean(a * b)

    return plain(loss)


@differs()
def entropy_of_mean():
    def loss(y, p):
        m = tf.reduce_mean(tf.nn.softmax(p), 0)
        return tf.reduce_sum(m * tf.math.log(m))  # here

    return plain(loss)


@differs()
def neighbours():
    return plain(
        lambda y, p: tf.reduce_mean(tf.square(p[1:] - p[:-1]))  # here
    )


@by_design()
def random_by_seed_and_row():
    def loss(y, p):
        w = tf.random.stateless_uniform(tf.shape(p), (1, 2))  # here
        return w * tf.square(p - y)

    return plain(loss)


@proven()
def random_by_seed_for_all():
    def loss(y, p):
        w = tf.random.stateless_uniform([3], (1, 2))
        return w * tf.square(p - y)

    return plain(loss)


@proven()
def sum_of_keras():
    return plain(keras.losses.MeanSquaredError(reduction="sum"), rate=0.005)


@proven()
def huber_of_keras():
    return plain(keras.losses.Huber(), metrics=["mae", "mse"])


@proven()
def cosine_of_keras():
    return plain(keras.losses.CosineSimilarity())
