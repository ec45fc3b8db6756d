"""Steps in which examples meet, or whose sizes follow from the data."""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.partition.cases.table import (
    BATCH,
    EXAMPLES,
    WIDTH,
    Own,
    case,
    errors,
    generator,
    images,
    minimized,
    minimizing,
    mse,
    normal,
    of_parts,
    plain,
    positives,
    rows,
    whole,
    with_layers,
    with_weight,
)


def _unit(p):
    return tf.math.l2_normalize(p, 1)


def _pairs():
    return normal(6), normal(4)


@case(plain, _pairs, outputs=4)
def only_the_diagonal(y, p):
    """A matrix of all pairs, of which only the pairs of each are used."""
    near = tf.matmul(_unit(p), _unit(y), transpose_b=True)
    return -tf.linalg.diag_part(near)


@case(minimized, outputs=3)
def views_interleaved(net, x, y):
    """The same picks, where the two views of an example are neighbours."""
    views = tf.stack([x, tf.reverse(x, [1])], 1)
    both = net(tf.reshape(views, [-1, 6]), training=True)
    one, two = both[::2], both[1::2]
    return mse(one, tf.stop_gradient(two)) + mse(y, two)


@case(plain)
def centred_in_function(y, p):
    @tf.function
    def centre(p):
        return p / tf.reduce_sum(tf.square(p), 0)

    return tf.square(centre(p) - y)


@case(plain)
def softmax_over_batch(y, p):
    return -y * tf.math.log(tf.nn.softmax(p, axis=0))


_autoencoder = functools.partial(of_parts, encoder=4, decoder=WIDTH)


@case()
def noised_with_time():
    """DDPM: a step of the schedule for each example, noise of its level."""

    def loss_of(net, x, y):
        time = keras.random.randint((rows(x),), 0, 5, seed=net.draws)
        noise = keras.random.normal(tf.shape(x), seed=net.draws)
        kept = tf.gather(tf.linspace(0.9, 0.1, 5), time)[:, None]
        noised = tf.sqrt(kept) * x + tf.sqrt(1 - kept) * noise
        code = net.encoder(noised) + net.embedding(time)
        return tf.reduce_mean(errors(noise, net.decoder(code)))

    net = _autoencoder(minimizing(loss_of))
    net.embedding = keras.layers.Embedding(5, 4)
    net.draws = keras.random.SeedGenerator(4)
    return net


def batched(x):
    """Arguments of ``fit`` with batches of what is no array."""
    data = tf.data.Dataset.from_tensor_slices((x, normal(1)))
    return {"x": data.batch(BATCH), "batch_size": None}


def _mostly_positive():
    """Targets of which each share of a batch has some above zero."""
    signs = np.where(np.arange(EXAMPLES) % 3, 1.0, -1.0)
    return normal(WIDTH), signs[:, None].astype("float32")


@case(plain, _mostly_positive)
def reshaped_by_positives(y, p):
    k = positives(y)
    w = tf.reshape(tf.linspace(0.1, 1.0, 720720), [-1, k])
    return errors(y, p) * tf.reduce_sum(w[0])


def _best(p):
    return tf.argmax(tf.stop_gradient(p), 1, tf.int32)


@case(plain)
def value_of_another(y, p):
    places = tf.stack([rows(p) - 1 - tf.range(rows(p)), _best(p)], 1)
    return tf.square(tf.gather_nd(p, places) - y[:, 0])


def _ragged_words():
    lengths = np.random.default_rng(2).integers(1, 6, EXAMPLES)
    lengths[3] = 0
    values = generator().integers(0, 9, lengths.sum())
    return batched(tf.RaggedTensor.from_row_lengths(values, lengths))


_of_table = functools.partial(with_weight, shape=(9, 4))


@case(_of_table, _ragged_words)
def ragged_to_dense(table, x):
    padded = x.to_tensor(default_value=0, shape=(None, 6))
    real = tf.sequence_mask(x.row_lengths(), 6, tf.float32)[..., None]
    return tf.reduce_sum(tf.gather(table, padded) * real, 1)


def _seen(call, **options):
    """Train a number from what a function makes of an image."""
    before = keras.layers.Conv2D(4, 3, padding="same")
    after = keras.layers.Flatten()
    return with_layers(before, Own(call), after, shape=(6, 6, 2), **options)


@case(_seen, images)
def patches_out_of_order(x):
    """The transpose comes before the batch is kept apart."""
    x = tf.transpose(x, [1, 2, 0, 3])
    return tf.reshape(x, [-1, 36, 4])


@case(_seen, images)
def atrous_by_space_to_batch(x):
    """Blocks of the picture go to the batch axis, and back."""
    x = tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])
    x = tf.nn.avg_pool2d(x, 3, 1, "SAME")
    return tf.batch_to_space(x, [2, 2], [[0, 0], [0, 0]])


def _graphs():
    edges = whole(2, 5, 5).astype("float32")
    return {"x": {"nodes": normal(5, 3), "edges": edges}, "y": normal(1)}


def _on_graphs(call):
    def body(weight, x):
        made = call(tf.tanh(x["nodes"] @ weight), x["edges"])
        return tf.reshape(made, [-1, made.shape[1:].num_elements()])

    return with_weight(body, (3, 4))


@case(_on_graphs, _graphs)
def messages_by_segments(nodes, edges):
    """One disjoint union of all graphs: numbers of nodes are offset."""
    flat = tf.reshape(nodes, [-1, 4])
    places = tf.where(edges > 0)
    source = tf.gather(flat, places[:, 0] * 5 + places[:, 1])
    target = places[:, 0] * 5 + places[:, 2]
    count = tf.shape(flat, tf.int64)[0]
    sums = tf.math.unsorted_segment_sum(source, target, count)
    return tf.reshape(sums, [-1, 5, 4])
