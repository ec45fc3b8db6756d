"""Sequences: dynamic programs, recurrent state, experts, ragged."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import (
    Own,
    case,
    floats,
    ints,
    step,
    with_layer,
)


@case(batch=5)
def stateful_rnn_across_batches():
    x = keras.Input((4, 3), batch_size=5)
    h = keras.layers.LSTM(
        4,
        stateful=True,
        return_sequences=True,
        recurrent_dropout=0.2,
        dropout=0.1,
        seed=3,
    )(x)
    h = keras.layers.GRU(3, stateful=True)(h)
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", "mse")
    return model, floats(20, 4, 3), floats(20, 1)


@case
def cell_of_my_own_with_norm_and_zoneout():
    class Cell(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.state_size = [4, 4]
            self.output_size = 4
            self.inner = keras.layers.Dense(16, use_bias=False)
            self.norm = keras.layers.LayerNormalization()
            self.seed = keras.random.SeedGenerator(4)

        def build(self, shape):
            self.inner.build((None, shape[-1] + 4))
            self.norm.build((None, 16))

        def call(self, x, states, training=False):
            h, c = states
            i, f, g, o = ops.split(
                self.norm(self.inner(ops.concatenate([x, h], -1))), 4, -1
            )
            new_c = ops.sigmoid(f + 1) * c + ops.sigmoid(i) * ops.tanh(g)
            new_h = ops.sigmoid(o) * ops.tanh(new_c)
            if training:
                keep = keras.random.uniform(ops.shape(h), seed=self.seed) < 0.2
                new_h = ops.where(keep, h, new_h)
            return new_h, [new_h, new_c]

    x = keras.Input((5, 3))
    h = keras.layers.Masking()(x)
    h = keras.layers.RNN(Cell(), return_sequences=True)(h)
    h = keras.layers.RNN([Cell(), Cell()], go_backwards=True)(h)
    model = keras.Model(x, keras.layers.Dense(2)(h))
    model.compile("adam", "mae")
    is_there = np.arange(5)[None] < ints(5, 20, 1) + 1
    data = floats(20, 5, 3) * is_there[..., None].astype("float32")
    return model, data, floats(20, 2)


class Choice(keras.layers.Layer):
    """Experts that choose their tokens."""

    def build(self, shape):
        self.route = self.add_weight(shape=(shape[-1], 2))
        self.up = self.add_weight(shape=(2, shape[-1], shape[-1]))

    def call(self, x):
        p = tf.nn.softmax(tf.matmul(x, tf.convert_to_tensor(self.route)))
        k = tf.maximum(tf.shape(x)[0] // 2, 1)
        gate, places = tf.math.top_k(tf.transpose(p), k)
        up = tf.convert_to_tensor(self.up)
        out = tf.einsum("ekd,edf->ekf", tf.gather(x, places), up)
        return x + tf.scatter_nd(
            tf.reshape(places, [-1, 1]),
            tf.reshape(out * gate[..., None], [-1, x.shape[-1]]),
            tf.shape(x),
        )


@case
def experts_that_choose_their_tokens():
    return with_layer(Choice())


class Lru(keras.layers.Layer):
    """A linear recurrence by a scan over time."""

    def build(self, shape):
        self.decay = self.add_weight(
            shape=(shape[-1],),
            initializer=keras.initializers.RandomUniform(0, 1, seed=3),
        )
        self.inner = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        a = ops.sigmoid(self.decay)
        b = ops.transpose(ops.matmul(x, self.inner), (1, 0, 2))

        def step(carry, row):
            new = a * carry + row
            return new, ops.tanh(new) * carry

        last, rows = ops.scan(step, ops.zeros_like(b[0]), b)
        return last + ops.mean(rows, axis=0)


@case
def linear_recurrence_by_scans_over_time():
    return with_layer(Lru(), (6, 3), loss="log_cosh")


FEATURES = floats(20, 9) * (floats(20, 9, seed=1) > 0.5)


@step(
    tf.sparse.from_dense(FEATURES.astype("float32")),
    (floats(20, 1, seed=2) > 0).astype("float32"),
    optimizer=lambda: keras.optimizers.Ftrl(0.1),
    batches=lambda data: data.batch(13),
)
class SparseFeaturesAndAFactorisationMachine(Own):
    def create(self):
        self.w = self.add_weight(shape=(9, 1))
        self.v = self.add_weight(shape=(9, 3))

    def call(self, x):
        w, v = tf.convert_to_tensor(self.w), tf.convert_to_tensor(self.v)
        linear = tf.sparse.sparse_dense_matmul(x, w)
        both = tf.sparse.sparse_dense_matmul(x, v) ** 2
        squares = tf.sparse.map_values(tf.square, x)
        each = tf.sparse.sparse_dense_matmul(squares, v**2)
        return linear + 0.5 * tf.reduce_sum(both - each, 1, keepdims=True)

    def loss_of(self, x, y):
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, self(x))
        return tf.reduce_mean(losses)
