"""Miniatures of public examples of Keras: vision, language, graphs, play."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.splitting.cases.table import (
    EXAMPLES,
    WIDTH,
    Own,
    apply,
    compiled,
    differs,
    generator,
    minimizing,
    mse,
    proven,
    stepped,
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


@proven(next_tokens)
def language_model():
    entrance = keras.Input((7,), dtype="int32")
    h = keras.layers.Embedding(9, 4)(entrance)
    h = keras.layers.MultiHeadAttention(2, 3)(h, h, use_causal_mask=True) + h
    h = keras.layers.LayerNormalization()(h)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Model(entrance, keras.layers.Dense(9)(h))
    return compiled(model, loss, metrics=["accuracy"])


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


@proven(sequences)
def forecasting():
    return with_layers(
        keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
        keras.layers.LSTM(4),
        shape=(8, WIDTH),
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
