"""Words, tags and regions, with unknown lengths."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases import table as t


def _of_words():
    entrance = keras.Input((8,), dtype="int32")
    words = layers.Flatten()(layers.Embedding(9, 4)(entrance))
    return keras.Model(entrance, layers.Dense(1)(words))


def _with_rows_changed(m, x, loss_of, change):
    """Train with another gradient of an embedding."""
    weights = m.trainable_variables
    with tf.GradientTape() as tape:
        loss = loss_of(m.net(x))
    first, *rest = tape.gradient(loss, weights)
    m.optimizer.apply([change(first), *rest], weights)
    return {"loss": loss}


@t.step(t.tokens, net=_of_words)
def words_clipped_by_row(m, x, y):
    def clipped(g):
        values = tf.clip_by_norm(g.values, 0.001, [1])
        return tf.IndexedSlices(values, g.indices, g.dense_shape)

    return _with_rows_changed(m, x, lambda p: t.mse(y, p), clipped)


@t.step(t.tokens, net=_of_words)
def indices_reordered(m, x, y):
    def reordered(g):
        at = tf.transpose(tf.reshape(g.indices, [-1, 8]))
        return tf.IndexedSlices(g.values, tf.reshape(at, [-1]), g.dense_shape)

    return _with_rows_changed(m, x, lambda p: tf.reduce_mean(y * p), reordered)


def _texts():
    """Up to six words; some texts are without."""
    words, counts = t.whole(4, 6), t.whole(7)
    texts = [
        " ".join("abcd"[word] for word in row[:count])
        for row, count in zip(words, counts, strict=True)
    ]
    return tf.constant(texts), t.normal(1)


@t.compiled_model(_texts)
def texts_as_long_as_the_longest():
    """The words of texts, padded, and their characters."""
    texts = keras.Input((), dtype="string")
    words = layers.TextVectorization(vocabulary=["a", "b", "c"])(texts)
    letters = layers.TextVectorization(
        vocabulary=["a", "b", " "], split="character", standardize=None
    )(texts)
    found = layers.Embedding(6, 3, mask_zero=True)(words)
    found = layers.Conv1D(3, 2, padding="same")(found)
    both = [ops.sum(found, 1), ops.sum(layers.Embedding(6, 3)(letters), 1)]
    return t.compiled(keras.Model(texts, layers.Dense(1)(ops.hstack(both))))


@t.compiled_model(_texts)
def counted_words_of_texts():
    """In each of the ways to count them, with pairs of neighbours."""
    texts = keras.Input((), dtype="string")
    known = ["a", "b", "a b"]
    counts = [
        layers.TextVectorization(vocabulary=known, ngrams=2, **options)(texts)
        for options in (
            {"output_mode": "multi_hot"},
            {
                "output_mode": "count",
                "max_tokens": 9,
                "pad_to_max_tokens": True,
            },
            {"output_mode": "tf_idf", "idf_weights": [0.5, 0.3, 0.7]},
        )
    ]
    counts = [ops.cast(each, "float32") for each in counts]
    sparse = layers.TextVectorization(
        vocabulary=known, output_mode="count", sparse=True
    )(texts)
    both = layers.Dense(1)(ops.hstack(counts)) + layers.Dense(1)(sparse)
    return t.compiled(keras.Model(texts, both))


@t.step(
    lambda: (t.normal(8, 3), t.whole(4, 8)),
    net=t.mlp(4, shape=(8, 3)),
    moves=lambda: keras.Variable(t.normal(4)[:4]),
)
def conditional_random_field(m, x, y):
    scores = m.net(x)
    lengths = 2 + tf.reduce_max(y, 1) * 2
    alpha, steps = scores[:, 0], tf.constant(1)

    def ahead(time, alpha):
        now = tf.reduce_logsumexp(alpha[:, :, None] + m.moves[None], 1)
        now += scores[:, time]
        return time + 1, tf.where((time < lengths)[:, None], now, alpha)

    _, alpha = tf.while_loop(
        lambda time, _: time < tf.reduce_max(lengths), ahead, [steps, alpha]
    )
    mask = tf.sequence_mask(lengths, 8, tf.float32)
    path = tf.reduce_sum(tf.gather(scores, y, batch_dims=2) * mask, 1)
    pairs = tf.stack([y[:, :-1], y[:, 1:]], -1)
    path += tf.reduce_sum(tf.gather_nd(m.moves.value, pairs) * mask[:, 1:], 1)
    return tf.reduce_mean(tf.reduce_logsumexp(alpha, 1) - path)


@t.step(
    lambda: (t.normal(6, 6, 2), t.normal(1)),
    net=t.mlp(1, shape=(8,)),
    shift=t.mlp(4, shape=(8,)),
)
def regions(m, x, y):
    pooled = tf.reshape(tf.image.resize(x, [2, 2]), [-1, 8])
    boxes = tf.sigmoid(m.shift(pooled))
    low = tf.minimum(boxes[:, :2], boxes[:, 2:])
    boxes = tf.concat([low, low + 0.4], 1)
    n = t.rows(x)
    seen = tf.image.crop_and_resize(x, boxes, tf.range(n), [2, 2])
    p = m.net(tf.reshape(seen, [n, -1]))
    flat = tf.reshape(tf.transpose(x, [0, 3, 1, 2]), [n * 2, 6, 6])
    patches = tf.image.extract_patches(
        flat[..., None], [1, 3, 3, 1], [1, 3, 3, 1], [1, 1, 1, 1], "VALID"
    )
    level = tf.reduce_mean(tf.reshape(patches, [n, -1]), 1, keepdims=True)
    return t.mse(y, p - level)
