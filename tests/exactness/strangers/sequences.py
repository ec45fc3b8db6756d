"""Sequences: dynamic programs, recurrent state, experts, ragged."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import (
    Own,
    built,
    case,
    dense,
    floats,
    ints,
)


def lengths_mask(rows, length, seed=0):
    return np.arange(length)[None] < ints(length, rows, 1, seed=seed) + 1


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
    data = floats(20, 5, 3) * lengths_mask(20, 5)[..., None]
    return model, data.astype("float32"), floats(20, 2)


@case
def experts_that_choose_their_tokens():
    class Choice(keras.layers.Layer):
        def build(self, shape):
            self.route = self.add_weight(shape=(shape[-1], 2))
            self.up = self.add_weight(shape=(2, shape[-1], shape[-1]))

        def call(self, x):
            p = tf.nn.softmax(tf.matmul(x, tf.convert_to_tensor(self.route)))
            k = tf.maximum(tf.shape(x)[0] // 2, 1)
            gate, places = tf.math.top_k(tf.transpose(p), k)
            chosen = tf.gather(x, places)
            out = (
                tf.einsum("ekd,edf->ekf", chosen, tf.convert_to_tensor(self.up))
                * gate[..., None]
            )
            return x + tf.scatter_nd(
                tf.reshape(places, [-1, 1]),
                tf.reshape(out, [-1, x.shape[-1]]),
                tf.shape(x),
            )

    x = keras.Input((6,))
    model = keras.Model(
        x, keras.layers.Dense(1)(Choice()(keras.layers.Dense(5, "relu")(x)))
    )
    model.compile("adam", "mse")
    return model, floats(20, 6), floats(20, 1)


@case
def sampled_softmax_with_shared_candidates():
    class Sampled(Own):
        def create(self):
            self.w = self.add_weight(shape=(12, 4))
            self.b = self.add_weight(shape=(12,), initializer="zeros")
            self.seed = keras.random.SeedGenerator(3)

        def loss_of(self, x, y):
            z = self.net(x)
            drawn = tf.cast(
                keras.random.randint((5,), 0, 12, seed=self.seed), "int64"
            )
            expected = (
                tf.ones_like(y[:, None], "float32") * 0.4,
                tf.ones([5]) * 0.4,
            )
            losses = tf.nn.sampled_softmax_loss(
                tf.convert_to_tensor(self.w),
                tf.convert_to_tensor(self.b),
                y[:, None],
                z,
                5,
                12,
                sampled_values=(drawn, *expected),
            )
            return tf.reduce_mean(losses)

    return (
        built(Sampled(net=dense(8, 4)), floats(2, 6)),
        floats(20, 6),
        ints(12, 20),
    )


@case
def linear_recurrence_by_scans_over_time():
    class Lru(keras.layers.Layer):
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

    x = keras.Input((6, 3))
    model = keras.Model(
        x, keras.layers.Dense(1)(Lru()(keras.layers.Dense(4)(x)))
    )
    model.compile("adam", "log_cosh")
    return model, floats(20, 6, 3), floats(20, 1)


@case(batch=10)
def transformer_xl_with_a_memory_of_the_last_batch():
    class Memory(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(1, 4)

        def build(self, shape):
            self.memory = self.add_weight(
                shape=(10, 3, shape[-1]), initializer="zeros", trainable=False
            )
            self.attention.build(shape, shape)

        def call(self, x):
            both = ops.concatenate([self.memory, x], axis=1)
            out = self.attention(x, both)
            self.memory.assign(ops.stop_gradient(x[:, -3:]))
            return x + out

    x = keras.Input((5, 4), batch_size=10)
    model = keras.Model(
        x, keras.layers.Dense(1)(Memory()(keras.layers.Dense(4)(x)))
    )
    model.compile("adam", "mse")
    return model, floats(20, 5, 4), floats(20, 5, 1)


@case
def hidden_markov_model_by_keras_scan():
    class Hmm(Own):
        def create(self):
            self.start = self.add_weight(shape=(3,))
            self.move = self.add_weight(shape=(3, 3))
            self.emit = self.add_weight(shape=(3, 5))

        def call(self, x):
            move = ops.log_softmax(self.move, axis=1)
            emit = ops.transpose(ops.log_softmax(self.emit, axis=1))
            steps = ops.transpose(ops.take(emit, x, axis=0), (1, 0, 2))

            def step(alpha, e):
                new = ops.logsumexp(alpha[:, :, None] + move[None], axis=1) + e
                return new, new

            last, _ = ops.scan(
                step, ops.log_softmax(self.start)[None] + steps[0], steps[1:]
            )
            return ops.logsumexp(last, axis=1)

        def loss_of(self, x, y):
            return -ops.mean(self(x))

    model = Hmm()
    return built(model, ints(5, 2, 6)), ints(5, 20, 6), None


@case
def capsules_with_routing():
    class Capsules(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[1], 3, shape[2], 4))

        def call(self, x):
            u = tf.einsum("bid,ijdk->bijk", x, tf.convert_to_tensor(self.w))
            b = tf.zeros(tf.shape(u)[:3])
            for i in range(3):
                c = tf.nn.softmax(b, 2)
                s = tf.reduce_sum(
                    c[..., None] * (u if i == 2 else tf.stop_gradient(u)), 1
                )
                n = tf.reduce_sum(s**2, -1, keepdims=True)
                v = n / (1 + n) * s / tf.sqrt(n + 1e-7)
                b += tf.einsum("bijk,bjk->bij", u, v)
            return tf.norm(v + 1e-6, axis=-1)

    def margin(y, p):
        t = tf.one_hot(tf.cast(tf.reshape(y, [-1]), "int32"), 3)
        return tf.reduce_sum(
            t * tf.nn.relu(0.9 - p) ** 2
            + 0.5 * (1 - t) * tf.nn.relu(p - 0.1) ** 2,
            -1,
        )

    x = keras.Input((4, 4, 1))
    h = keras.layers.Conv2D(4, 2)(x)
    h = keras.layers.Reshape((9, 4))(h)
    model = keras.Model(x, Capsules()(h))
    model.compile("adam", margin, metrics=["accuracy"])
    return model, floats(20, 4, 4, 1), ints(3, 20)


@case
def sparse_features_and_a_factorisation_machine():
    class Fm(Own):
        def create(self):
            self.w = self.add_weight(shape=(9, 1))
            self.v = self.add_weight(shape=(9, 3))

        def call(self, x):
            linear = tf.sparse.sparse_dense_matmul(
                x, tf.convert_to_tensor(self.w)
            )
            v = tf.convert_to_tensor(self.v)
            both = tf.sparse.sparse_dense_matmul(x, v) ** 2
            each = tf.sparse.sparse_dense_matmul(
                tf.sparse.map_values(tf.square, x), v**2
            )
            return linear + 0.5 * tf.reduce_sum(both - each, 1, keepdims=True)

        def loss_of(self, x, y):
            return tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(
                    labels=y, logits=self(x)
                )
            )

    dense_x = floats(20, 9) * (floats(20, 9, seed=1) > 0.5)
    x = tf.sparse.from_dense(dense_x.astype("float32"))
    y = (floats(20, 1, seed=2) > 0).astype("float32")
    model = Fm()
    model(tf.sparse.from_dense(np.eye(9, dtype="float32")[:2]))
    model.compile(keras.optimizers.Ftrl(0.1))
    return model, tf.data.Dataset.from_tensor_slices((x, y)).batch(13), None


@case
def strings_hashed_crossed_and_looked_up():
    name, age = (
        keras.Input((1,), dtype="string", name="name"),
        keras.Input((1,), name="age"),
    )
    ids = keras.layers.StringLookup(
        vocabulary=["ann", "bob", "cem"], num_oov_indices=2
    )(name)
    hashed = keras.layers.Hashing(5, salt=3)(name)
    bucket = keras.layers.Discretization([-1.0, 0.0, 1.0])(age)
    crossed = keras.layers.HashedCrossing(7)([hashed, bucket])
    parts = [
        keras.layers.Flatten()(keras.layers.Embedding(8, 3)(v))
        for v in (ids, hashed, crossed)
    ]
    parts.append(keras.layers.CategoryEncoding(4, "multi_hot")(bucket))
    h = keras.layers.Concatenate()([*parts, age])
    model = keras.Model(
        {"name": name, "age": age}, keras.layers.Dense(1)(dense(6, 4)(h))
    )
    model.compile(
        "adam",
        "mse",
        metrics=[keras.metrics.R2Score(), keras.metrics.PearsonCorrelation()],
    )
    words = np.array(["ann", "bob", "cem", "dan", "eve"])[ints(5, 20, 1)]
    x = {"name": tf.constant(words), "age": floats(20, 1)}
    return (
        model,
        tf.data.Dataset.from_tensor_slices((x, floats(20, 1, seed=3))).batch(
            13
        ),
        None,
    )
