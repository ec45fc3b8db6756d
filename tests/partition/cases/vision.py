"""Pictures, sound, graphs, sets, experts and columns."""

import functools

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    Own,
    case,
    dense,
    images,
    layered,
    minimizing,
    mse,
    normal,
    of_parts,
    rows,
    stacked,
    whole,
    with_layers,
    with_weight,
)


def _masks():
    """Small images, and which of two classes each pixel has."""
    return normal(6, 6, 2), whole(2, 6, 6, 1).astype("float32")


def _pixels(loss):
    """Train a score of each pixel."""
    score = keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")
    return stacked(score, shape=(6, 6, 2), loss=loss)


def _seen(call, **options):
    """Train a number from what a function makes of an image."""
    before = keras.layers.Conv2D(4, 3, padding="same")
    after = keras.layers.Flatten()
    return with_layers(before, Own(call), after, shape=(6, 6, 2), **options)


@case(_pixels, _masks)
def hardest_pixels(y, p):
    """OHEM: only the hardest fifth of all pixels of the batch counts."""
    each = tf.reshape(tf.square(y - p), [-1])
    kept, _ = tf.math.top_k(each, tf.size(each) // 5)
    return tf.reduce_mean(kept)


@case(_seen, images)
def patches_out_of_order(x):
    """The transpose comes before the batch is kept apart."""
    x = tf.transpose(x, [1, 2, 0, 3])
    return tf.reshape(x, [-1, 36, 4])


@case(_seen, images)
def windows_with_shift(x):
    """Swin: rolled in the picture, not over the batch."""
    x = tf.reshape(tf.roll(x, [-1, -1], [1, 2]), [-1, 2, 3, 2, 3, 4])
    x = tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [-1, 9, 4])
    x = tf.sin(x) - tf.reduce_mean(x, 1, keepdims=True)
    return tf.reshape(x, [-1, 144])


@case(_seen, images)
def atrous_by_space_to_batch(x):
    """Blocks of the picture go to the batch axis, and back."""
    x = tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])
    x = tf.nn.avg_pool2d(x, 3, 1, "SAME")
    return tf.batch_to_space(x, [2, 2], [[0, 0], [0, 0]])


@case(_seen, images)
def resized_images(x):
    return tf.image.resize(x, [4, 5], antialias=True)


@case(_seen, images)
def sampled_by_coordinates(x):
    """A spatial transformer: indices of the batch go along."""
    at = tf.reduce_mean(x, (1, 2))[:, :2] * 2 + 2
    cell = tf.cast(tf.clip_by_value(tf.stop_gradient(at), 0, 4), tf.int32)
    number = tf.range(rows(x))[:, None]
    picked = tf.gather_nd(x, tf.concat([number, cell], 1))
    return picked * tf.reduce_sum(at, 1, keepdims=True)


@case(_seen, images)
def cropped_by_boxes(x):
    """Boxes of every image, with indices of their images."""
    box = tf.tile([[0.1, 0.0, 0.8, 0.9]], [rows(x), 1])
    return tf.image.crop_and_resize(x, box, tf.range(rows(x)), [3, 3])


@case(_seen, images)
def kernels_of_each_example(x):
    """Dynamic convolution: the batch goes to the channels, in groups."""
    weights = tf.reduce_mean(x, (1, 2))
    flat = tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [1, 6, 6, -1])
    kernel = tf.reshape(weights, [1, 1, -1, 1]) * tf.ones((3, 3, 1, 1))
    out = tf.nn.depthwise_conv2d(flat, kernel, [1, 1, 1, 1], "SAME")
    return tf.transpose(tf.reshape(out, [6, 6, -1, 4]), [2, 0, 1, 3])


def _points():
    return normal(5, 3), normal(1)


def _clouds(call):
    layers = dense(4, "tanh"), Own(call), keras.layers.Flatten()
    return with_layers(*layers, shape=(5, 3))


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


@case(_on_graphs, _graphs)
def readout_by_graph(nodes, edges):
    """Nodes are pooled by the number of their graph, in order."""
    number = tf.repeat(tf.range(rows(nodes)), 5)
    return tf.math.segment_mean(tf.reshape(nodes, [-1, 4]), number)


@case(_clouds, _points)
def neighbours_in_any_cloud(x):
    """The gather lacks its batch_dims, and takes the first clouds' points."""
    far = tf.reduce_sum((x[:, :, None] - x[:, None]) ** 2, -1)
    _, near = tf.math.top_k(-far, 3)
    around = tf.gather(tf.reshape(x, [-1, 4]), near)
    return tf.reduce_max(around - x[:, :, None], 2)


@case(functools.partial(of_parts, first=1, second=1))
@minimizing
def experts_by_stitching(net, x, y):
    """Examples are dispatched by dynamic_partition, and stitched back."""
    choice = tf.cast(x[:, 0] > 0, tf.int32)
    parts = tf.dynamic_partition(x, choice, 2)
    places = tf.dynamic_partition(tf.range(rows(x)), choice, 2)
    outs = [net.first(parts[0]), net.second(parts[1])]
    return mse(y, tf.dynamic_stitch(places, outs))


@case(layered, units=6)
def sparse_attention_over_features(x):
    """TabNet's sparsemax, and its prior, of every example."""

    def sparsemax(z):
        top = tf.sort(z, direction="DESCENDING")
        sums = tf.cumsum(top, -1)
        fits = tf.cast(1 + tf.range(1.0, 7.0) * top > sums, tf.float32)
        size = tf.reduce_sum(fits, -1, keepdims=True)
        last = tf.gather(sums, tf.cast(size, tf.int32) - 1, batch_dims=1)
        return tf.nn.relu(z - (last - 1) / size)

    prior, out = tf.ones_like(x), 0.0
    for _ in range(2):
        mask = sparsemax(x * prior)
        prior, out = prior * (1.2 - mask), out + mask * x
    return out


@case(layered)
def binned_by_fixed_limits(x):
    number = tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 1.0])
    return tf.reduce_sum(tf.one_hot(number, 4), 1)


@case(data=images)
def convolutions():
    return with_layers(
        keras.layers.Conv2D(3, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.SeparableConv2D(4, 2),
        keras.layers.GroupNormalization(2),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )
