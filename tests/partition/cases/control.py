"""Steps of functions, branches and loops, also such that write state."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases import table as t


@t.step()
def private_by_jacobian(m, x, y):
    """DP-SGD without noise, whose mean is made by the batch in Python."""
    weights = m.trainable_variables
    with tf.GradientTape() as tape:
        each = tf.reduce_mean(tf.square(m.net(x) - y), -1)
    moves = []
    for g in tape.jacobian(each, weights):
        flat = tf.clip_by_norm(tf.reshape(g, [t.rows(x), -1]), 0.3, axes=[1])
        mean = tf.reduce_sum(flat, 0) / t.BATCH
        moves.append(tf.reshape(mean, tf.shape(g)[1:]))
    m.optimizer.apply(moves, weights)
    return {"loss": tf.reduce_mean(each)}


@t.step(kept=t.state())
def scaled_by_the_first_batch(m, x, y):
    """As activation normalization starts."""

    def start():
        m.kept.assign(tf.math.reduce_std(x))
        return tf.constant(0)

    tf.cond(m.kept > 0, lambda: tf.constant(0), start)
    return t.default_loss(m, x / m.kept, y)


@t.step()
def updated_in_a_branch_before_it_is_built(m, x, y):
    loss, grads = t.gradients_of(m, x, y)
    good = tf.reduce_all([tf.reduce_all(g < 1e9) for g in grads])

    def update():
        m.optimizer.apply(grads, m.trainable_variables)
        return tf.constant(1.0)

    return {"loss": loss, "done": tf.cond(good, update, lambda: 0.0)}


def _trained_until_the_loss_is_small(m, x, y):
    def once(i, _):
        loss, grads = t.gradients_of(m, x, y)
        m.others[0].apply(grads, m.trainable_variables)
        return i + 1, loss

    i, loss = tf.while_loop(
        lambda i, loss: (i < 5) & (loss > 0.5), once, (0, tf.constant(9.0))
    )
    return {"loss": loss, "steps": i}


@t.compiled_model()
def steps_until_the_loss_is_small():
    adam = keras.optimizers.Adam(0.05)
    net = t.mlp(5, 1)()
    model = t.ByHand(_trained_until_the_loss_is_small, net=net, others=[adam])
    adam.build(model.trainable_variables)
    return t.compiled(model)


@t.step(calls=t.state(dtype="int64"))
def branch_by_the_loss(m, x, y):
    p = m.net(x)
    mse = t.mse(y, p)
    m.calls.assign_add(1)
    return tf.cond(
        mse > 1.5,
        lambda: tf.reduce_mean(tf.abs(p - y)),
        lambda: tf.switch_case(
            tf.cast(m.calls % 2, tf.int32),
            [lambda: mse, lambda: mse + tf.reduce_max(tf.abs(p))],
        ),
    )


@t.step()
def written_for_autograph(m, x, y):
    @tf.function
    def lost(p, y):
        far = tf.abs(p - y)
        worst = tf.reduce_max(far)
        while worst > 1.0:
            far = far / 2
            worst = tf.reduce_max(far)
        total = 0.0
        for row in far:
            if row[0] > 0.5:
                continue
            total += row[0]
        if tf.reduce_any(p > 10.0):
            return total
        return total / tf.cast(t.rows(y), tf.float32)

    return lost(m.net(x), y)


class Mixed(layers.Layer):
    """A layer of Keras's own loops and maps."""

    def build(self, shape):
        self.w = self.add_weight(shape=(3, 3))

    def compute_output_shape(self, shape):
        return shape[0], 6

    def call(self, x):
        h = ops.matmul(x, self.w)
        _, states = ops.scan(
            lambda c, v: (0.5 * c + v, ops.tanh(c)),
            ops.zeros_like(h[:, 0]),
            ops.swapaxes(h, 0, 1),
        )
        h = ops.swapaxes(states, 0, 1)
        h = ops.cumsum(h, axis=1)
        h += ops.vectorized_map(lambda v: v - ops.max(v), h)
        norm = ops.fori_loop(
            0, 3, lambda i, v: v / (ops.norm(v) + 1), ops.mean(h, 1)
        )
        ids = ops.argmax(norm, -1)
        groups = ops.segment_sum(norm, ids, 3)
        return ops.concatenate(
            [ops.mean(h, 1), norm - ops.take(groups, ids, 0)], -1
        )


@t.compiled_model(lambda: (t.normal(6, 3), t.normal(1)))
def written_by_keras_operations():
    return t.compiled(t.stack(Mixed(), layers.Dense(1), shape=(6, 3)))
