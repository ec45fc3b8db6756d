"""Miniatures of public examples of Keras: vision, language, graphs, play."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    EXAMPLES,
    WIDTH,
    Own,
    apply,
    classes,
    compiled,
    differs,
    generator,
    minimizing,
    mse,
    plain,
    proven,
    stepped,
    tokens,
    with_layers,
    with_variable,
)


def sequences():
    """Sequences of features, and a number for each."""
    make = generator()
    x = make.normal(size=(EXAMPLES, 8, WIDTH)).astype("float32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


def next_tokens():
    """Sequences of words, and those that follow them."""
    x = generator().integers(1, 9, (EXAMPLES, 8)).astype("int32")
    return x[:, :-1], x[:, 1:]


@differs()
def simclr():
    """Two views of each example, told from those of all others."""

    def loss_of(model, x, y):
        a = tf.math.l2_normalize(model(x, training=True), 1)
        b = tf.math.l2_normalize(model(0.9 * x, training=True), 1)
        s = tf.matmul(a, b, transpose_b=True) / 0.1  # here
        at = tf.range(tf.shape(x)[0])
        losses = keras.losses.sparse_categorical_crossentropy(
            at, s, from_logits=True
        )
        return tf.reduce_mean(losses)

    return stepped(minimizing(loss_of), 4)


@proven()
def byol():
    def step(model, x, y):
        target = tf.stop_gradient(x @ model.kept)
        with tf.GradientTape() as tape:
            a = tf.math.l2_normalize(model(x, training=True), 1)
            b = tf.math.l2_normalize(target, 1)
            loss = tf.reduce_mean(2 - 2 * tf.reduce_sum(a * b, 1))
        return apply(model, tape, loss)

    return with_variable(step, (WIDTH, 4), 0.1, outputs=4)


@differs()
def nnclr():
    """The nearest of a queue of earlier examples is the positive."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            a = tf.math.l2_normalize(model(x, training=True), 1)
            s = tf.matmul(a, model.kept, transpose_b=True)
            near = tf.gather(model.kept, tf.argmax(s, 1))
            loss = -tf.reduce_mean(tf.reduce_sum(a * near, 1))
        kept = tf.concat([a, model.kept], 0)[:12]  # here
        model.kept.assign(kept)
        return apply(model, tape, loss)

    return with_variable(step, (12, 4), 0.3, outputs=4)


@proven()
def siamese_triplets():
    def loss_of(model, x, y):
        a, b, c = (model(t, training=True) for t in (x, 0.9 * x, x + y))
        near = tf.reduce_sum(tf.square(a - b), -1)
        far = tf.reduce_sum(tf.square(a - c), -1)
        return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))

    return stepped(minimizing(loss_of), 4)


@proven(classes)
def distillation():
    """Soft targets of a frozen teacher, beside the hard ones."""

    def loss(y, p):
        soft = tf.nn.softmax(tf.stop_gradient(0.5 * p + 1.0) / 3)
        apart = keras.losses.kl_divergence(soft, tf.nn.softmax(p / 3))
        hard = keras.losses.sparse_categorical_crossentropy(
            y, p, from_logits=True
        )
        return 0.1 * hard + 0.9 * apart * 9

    return plain(loss)


@proven(next_tokens)
def language_model():
    entrance = keras.Input((7,), dtype="int32")
    h = keras.layers.Embedding(9, 4)(entrance)
    h = keras.layers.MultiHeadAttention(2, 3)(h, h, use_causal_mask=True) + h
    h = keras.layers.LayerNormalization()(h)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Model(entrance, keras.layers.Dense(9)(h))
    return compiled(model, loss, metrics=["accuracy"])


@differs(next_tokens)
def loss_of_real_tokens():
    """The mean over all words but one kind, as translators have it."""

    def loss(y, p):
        e = keras.losses.sparse_categorical_crossentropy(y, p, True)
        mask = tf.cast(y != 3, e.dtype)
        return tf.reduce_sum(e * mask) / tf.reduce_sum(mask)  # here

    entrance = keras.Input((7,), dtype="int32")
    h = keras.layers.Embedding(9, 4)(entrance)
    return compiled(keras.Model(entrance, keras.layers.Dense(9)(h)), loss)


@proven(sequences)
def masked_autoencoder():
    """Entries of each example are picked, and told from the others."""

    def call(layer, x):
        first = tf.argsort(tf.reduce_sum(x, -1), axis=-1)[:, :3]
        seen = tf.gather(x * layer.kept, first, axis=1, batch_dims=1)
        return x + tf.reduce_mean(seen, 1, keepdims=True)

    return with_layers(
        keras.layers.Dense(WIDTH),
        Own(call, shape=(WIDTH,), trainable=True),
        keras.layers.Flatten(),
        shape=(8, WIDTH),
    )


@proven()
def q_learning():
    """The value of the action that was taken."""

    def step(model, x, y):
        taken = tf.argmax(x[:, :3], 1, output_type=tf.int32)
        goal = y[:, 0] + 0.9 * tf.reduce_max(x @ model.kept, 1)
        with tf.GradientTape() as tape:
            q = model(x, training=True)
            q = tf.gather(q, taken, batch_dims=1)
            loss = tf.reduce_mean(keras.losses.huber(goal[:, None], q[:, None]))
        return apply(model, tape, loss)

    return with_variable(step, (WIDTH, 3), 0.1, outputs=3)


@proven()
def q_learning_by_one_hot():
    def step(model, x, y):
        taken = tf.one_hot(tf.argmax(x[:, :3], 1), 3)
        with tf.GradientTape() as tape:
            q = tf.reduce_sum(model(x, training=True) * taken, 1)
            loss = tf.reduce_mean(tf.square(q - y[:, 0]))
        return apply(model, tape, loss)

    return stepped(step, 3)


@differs()
def actor_critic():
    """Returns are normalized over the batch."""

    def loss_of(model, x, y):
        out = model(x, training=True)
        logp = tf.nn.log_softmax(out[:, :2])[:, 0]
        returns = (y - tf.reduce_mean(y)) / tf.math.reduce_std(y)  # here
        value = out[:, 2]
        gain = returns[:, 0] - value
        loss = -tf.reduce_mean(logp * tf.stop_gradient(gain))
        loss += tf.reduce_mean(tf.square(gain))
        return loss

    return stepped(minimizing(loss_of), 3)


@proven()
def clipped_policy():
    """PPO, whose advantages come with the data."""

    def step(model, x, y):
        old = tf.nn.log_softmax(x[:, :2])[:, 0]
        with tf.GradientTape() as tape:
            logp = tf.nn.log_softmax(model(x, training=True))[:, 0]
            ratio = tf.exp(logp - old)
            least = tf.where(y[:, 0] > 0, 1.2 * y[:, 0], 0.8 * y[:, 0])
            loss = -tf.reduce_mean(tf.minimum(ratio * y[:, 0], least))
        return apply(model, tape, loss)

    return stepped(step, 2)


@differs()
def stops_at_divergence():
    """PPO skips an update if the policy moved too far on the mean."""

    def step(model, x, y):
        old = tf.nn.log_softmax(x[:, :2])
        with tf.GradientTape() as tape:
            new = tf.nn.log_softmax(model(x, training=True))
            moved = tf.reduce_mean(tf.reduce_sum(tf.exp(old) * (old - new), 1))
            loss = -tf.reduce_mean(new[:, 0] * y[:, 0])
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        on = tf.cast(moved < 0.2, tf.float32)  # here
        model.optimizer.apply([on * g for g in grads], weights)
        return {"loss": loss}

    return stepped(step, 2)


@proven(sequences)
def graph_of_each():
    """Messages between the nodes of each example's graph."""

    def call(layer, x):
        near = tf.nn.softmax(x @ tf.transpose(x, [0, 2, 1]))
        return near @ (x * layer.kept)

    return with_layers(
        Own(call, shape=(WIDTH,), trainable=True),
        keras.layers.GlobalMaxPooling1D(),
        shape=(8, WIDTH),
    )


@differs()
def graph_of_all():
    """Examples are the nodes of one graph."""

    def call(layer, x):
        near = tf.cast(x @ tf.transpose(x) > 0, tf.float32)  # here
        return near @ x / tf.reduce_sum(near, 1, keepdims=True)

    return with_layers(keras.layers.Dense(4), Own(call))


@proven(sequences)
def forecasting():
    return with_layers(
        keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
        keras.layers.LSTM(4),
        shape=(8, WIDTH),
    )


@proven(sequences)
def transformer_of_series():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 3)
            self.norm = keras.layers.LayerNormalization()

        def call(self, x):
            return x + self.attention(self.norm(x), self.norm(x))

        def compute_output_shape(self, shape):
            return shape

    return with_layers(
        Block(), keras.layers.GlobalAveragePooling1D(), shape=(8, WIDTH)
    )


@proven()
def physics():
    """The residual of an equation, by derivatives of the network."""

    def loss_of(model, x, y):
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                u = model(x, training=True)
            slope = first.gradient(u, x)
        curve = second.gradient(slope, x)
        rest = curve[:, 0] + u[:, 0] - y[:, 0]
        return tf.reduce_mean(tf.square(rest)) + mse(y, u)

    return stepped(minimizing(loss_of))


@proven()
def critic_of_wasserstein():
    """The penalty on the gradients of each example between two."""

    def loss_of(model, x, y):
        with tf.GradientTape() as inner:
            between = 0.3 * x + 0.7 * tf.tanh(x)
            inner.watch(between)
            p = model(between, training=True)
        g = inner.gradient(p, between)
        size = tf.sqrt(tf.reduce_sum(tf.square(g), 1))
        cost = tf.reduce_mean(model(tf.tanh(x))) - tf.reduce_mean(model(x))
        return cost + 10 * tf.reduce_mean((size - 1.0) ** 2)

    return stepped(minimizing(loss_of))


@differs()
def decorrelated_features():
    def loss_of(model, x, y):
        p = model(x, training=True)
        p = (p - tf.reduce_mean(p, 0)) / tf.math.reduce_std(p, 0)  # here
        n = tf.cast(tf.shape(x)[0], tf.float32)
        c = tf.transpose(p) @ (0.5 * p + x[:, :4]) / n
        return tf.reduce_sum(tf.square(c - tf.eye(4)))

    return stepped(minimizing(loss_of), 4)


@proven(tokens)
def recommender():
    """The product of two embeddings, one of which is a mean of words."""

    class Words(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = mse(y, self(x, training=True))
            return apply(self, tape, loss)

    entrance = keras.Input((8,), dtype="int32")
    words = keras.layers.Embedding(9, 4)(entrance[:, 1:])
    user = keras.layers.Embedding(9, 4)(entrance[:, 0])
    mean = keras.layers.GlobalAveragePooling1D()(words)
    return compiled(Words(entrance, keras.layers.Dot(1)([user, mean])))


@differs()
def two_towers_of_a_recommender():
    """Candidates of other examples are the negatives."""

    def loss_of(model, x, y):
        user = model(x, training=True)
        item = x[:, :4] + y
        s = user @ tf.transpose(item)  # here
        n = tf.shape(x)[0]
        loss = tf.nn.softmax_cross_entropy_with_logits(tf.eye(n), s)  # here
        return tf.reduce_sum(loss)

    return stepped(minimizing(loss_of), 4)


@proven()
def consistency():
    """Two heads, of which the surer one teaches the other."""

    def loss_of(model, x, y):
        p = model(x, training=True)
        a, b = tf.split(tf.nn.softmax(tf.reshape(p, [-1, 2, 3])), 2, 1)
        a, b = tf.squeeze(a, 1), tf.squeeze(b, 1)
        sure = tf.cast(tf.reduce_max(a, 1) > 0.4, tf.float32)
        e = keras.losses.categorical_crossentropy(tf.stop_gradient(a), b)
        return tf.reduce_mean(e * sure)

    return stepped(minimizing(loss_of), 6)
