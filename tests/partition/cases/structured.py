"""Words, graphs and pictures, with masks and unknown lengths."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases.by_hand import built, fitted, hand, net
from tests.partition.cases.table import normal, tokens, whole


def transformer(units=9):
    given = keras.Input([None], dtype="int32")
    mask = ops.not_equal(given, 0)
    x = layers.Embedding(9, 8)(given)
    attended = layers.MultiHeadAttention(2, 4)(
        x, x, attention_mask=ops.expand_dims(mask, 1)
    )
    x = layers.LayerNormalization()(x + attended)
    return keras.Model(given, layers.Dense(units)(x))


@hand(tokens, net=transformer)
def masked_words(m, x, y):
    masked = tf.logical_and(x > 0, tf.equal((x + tf.range(8)) % 3, 0))
    logits = m.net(tf.where(masked, 8, x))
    logits = tf.boolean_mask(logits, masked)
    labels = tf.boolean_mask(x, masked)
    lost = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    right = tf.equal(tf.argmax(logits, -1, tf.int32), labels)
    with_none = tf.maximum(tf.size(labels), 1)
    accuracy = tf.reduce_sum(tf.cast(right, tf.int32)) / with_none
    return tf.reduce_sum(lost) / tf.cast(with_none, tf.float32) + 0 * tf.cast(
        accuracy, tf.float32
    )


@fitted(tokens)
def causal_transformer():
    given = keras.Input([8], dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(given)
    x += layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(given, layers.Dense(1)(x))
    model.compile(
        keras.optimizers.SGD(0.05, 0.9, clipnorm=0.5, use_ema=True),
        "mae",
        metrics=["mse", keras.metrics.R2Score()],
        jit_compile=False,
    )
    return model


@hand(
    tokens, table=lambda: keras.Variable(normal(4)[:9]), head=net(1, shape=(4,))
)
def bag_of_ragged_words(m, x, y):
    ragged = tf.RaggedTensor.from_tensor(x, padding=0)
    ragged = tf.ragged.boolean_mask(ragged, ragged > 2)
    vectors = tf.ragged.map_flat_values(
        tf.nn.embedding_lookup, m.table.value, ragged
    )
    mean = tf.reduce_sum(vectors, 1)
    mean /= tf.cast(tf.maximum(ragged.row_lengths(), 1), tf.float32)[:, None]
    return tf.reduce_mean((m.head(mean) - y) ** 2)


def _speech():
    return normal(12, 3), whole(4, 4)


def recurrent():
    return built(
        layers.Bidirectional(layers.GRU(4, return_sequences=True)),
        layers.Dense(5),
        shape=(12, 3),
    )


@hand(_speech, net=recurrent)
def ctc(m, x, y):
    logits = m.net(x)
    length = tf.fill([tf.shape(x)[0]], 12)
    return tf.reduce_mean(
        tf.nn.ctc_loss(
            y,
            logits,
            tf.reduce_sum(tf.cast(y > 0, tf.int32), 1),
            length,
            logits_time_major=False,
            blank_index=0,
        )
    )


@hand(
    lambda: (normal(8, 3), whole(4, 8)),
    net=lambda: built(layers.Dense(4), shape=(8, 3)),
    moves=lambda: keras.Variable(normal(4)[:4]),
)
def conditional_random_field(m, x, y):
    scores = m.net(x)
    lengths = 2 + tf.reduce_max(y, 1) * 2
    alpha, steps = scores[:, 0], tf.constant(1)

    def ahead(t, alpha):
        now = tf.reduce_logsumexp(alpha[:, :, None] + m.moves[None], 1)
        now += scores[:, t]
        return t + 1, tf.where((t < lengths)[:, None], now, alpha)

    _, alpha = tf.while_loop(
        lambda t, _: t < tf.reduce_max(lengths), ahead, [steps, alpha]
    )
    mask = tf.sequence_mask(lengths, 8, tf.float32)
    path = tf.reduce_sum(tf.gather(scores, y, batch_dims=2) * mask, 1)
    pairs = tf.stack([y[:, :-1], y[:, 1:]], -1)
    path += tf.reduce_sum(tf.gather_nd(m.moves.value, pairs) * mask[:, 1:], 1)
    return tf.reduce_mean(tf.reduce_logsumexp(alpha, 1) - path)


def pixels():
    return built(
        layers.Conv2D(4, 3, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.Conv2DTranspose(3, 3, padding="same"),
        shape=(6, 6, 2),
    )


@hand(lambda: (normal(6, 6, 2), whole(4, 6, 6)), net=pixels)
def segmentation(m, x, y):
    logits = m.net(x, training=True)
    flat = tf.reshape(logits, [-1, 3])
    labels = tf.reshape(y, [-1])
    keep = tf.squeeze(tf.where(labels < 3), 1)
    labels, flat = tf.gather(labels, keep), tf.gather(flat, keep)
    lost = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, flat)
    p, t = tf.nn.softmax(flat), tf.one_hot(labels, 3)
    both = tf.reduce_sum(p * t, 0)
    dice = 1 - (2 * both + 1) / (tf.reduce_sum(p + t, 0) + 1)
    return tf.reduce_mean(lost) + tf.reduce_mean(dice)
