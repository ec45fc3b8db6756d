"""Pictures: segmentation, detection, sampling, patches, similarity."""

import keras
import tensorflow as tf

from tests.splitting.hostile.table import (
    couples,
    dense,
    functional,
    images,
    masks,
    normal,
    own,
    rows,
    splits,
    whole,
)

layers = keras.layers
SHAPE = (6, 6, 2)


def _pixels(loss, **options):
    """Train a score of each pixel."""

    def body(x):
        return layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x)

    return functional(body, SHAPE, loss=loss, **options)


def _seen(call, **options):
    """Train a number from what a function makes of an image."""

    def body(x):
        x = layers.Conv2D(4, 3, padding="same")(x)
        return dense(1)(layers.Flatten()(own(call)(x)))

    return functional(body, SHAPE, **options)


@couples(masks, says="dice")
def dice_of_keras():
    return _pixels(keras.losses.Dice(name="dice"))


@splits(masks)
def focal_by_hand():
    def loss(y, p):
        p = tf.clip_by_value(p, 1e-6, 1 - 1e-6)
        right = tf.where(y == 1, p, 1 - p)
        return -tf.reduce_sum((1 - right) ** 2 * tf.math.log(right), (1, 2, 3))

    return _pixels(loss)


@couples(masks)
def hardest_pixels():
    """OHEM: only the hardest fifth of all pixels of the batch counts."""

    def loss(y, p):
        each = tf.reshape(tf.square(y - p), [-1])
        kept, _ = tf.math.top_k(each, tf.size(each) // 5)  # here
        return tf.reduce_mean(kept)

    return _pixels(loss)


@splits(masks)
def hardest_pixels_of_each():
    def loss(y, p):
        each = tf.reshape(tf.square(y - p), [rows(y), -1])
        kept, _ = tf.math.top_k(each, tf.shape(each)[1] // 5)
        return tf.reduce_mean(kept, 1)

    return _pixels(loss)


@splits(masks)
def structural_similarity():
    def loss(y, p):
        return 1 - tf.image.ssim(y, p, 1.0, filter_size=3)

    return _pixels(loss)


@couples(images)
def patches_out_of_order():
    """The transpose comes before the batch is kept apart."""

    def cut(x):
        x = tf.transpose(x, [1, 2, 0, 3])
        return tf.reshape(x, [-1, 36, 4])  # here

    return _seen(cut)


@splits(images)
def windows_with_shift():
    """Swin: rolled in the picture, not over the batch."""

    def shift(x):
        x = tf.roll(x, [-1, -1], [1, 2])
        x = tf.reshape(
            tf.transpose(
                tf.reshape(x, [-1, 2, 3, 2, 3, 4]), [0, 1, 3, 2, 4, 5]
            ),
            [-1, 9, 4],
        )
        x = x - tf.reduce_mean(x, 1, keepdims=True)
        return tf.reshape(x, [-1, 144])

    return _seen(shift)


@splits(images)
def atrous_by_space_to_batch():
    """Blocks of the picture go to the batch axis, and back."""

    def dilated(x):
        x = tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])
        x = tf.nn.avg_pool2d(x, 3, 1, "SAME")
        return tf.batch_to_space(x, [2, 2], [[0, 0], [0, 0]])

    return _seen(dilated)


@splits(images)
def standardized_images():
    return _seen(tf.image.per_image_standardization)


@splits(images)
def resized_images():
    return _seen(lambda x: tf.image.resize(x, [4, 5], antialias=True))


@splits(images)
def sampled_by_coordinates():
    """A spatial transformer: indices of the batch go along."""

    def warp(x):
        at = tf.reduce_mean(x, (1, 2))[:, :2] * 2 + 2
        cell = tf.cast(tf.clip_by_value(tf.stop_gradient(at), 0, 4), tf.int32)
        number = tf.range(rows(x))[:, None]
        picked = tf.gather_nd(x, tf.concat([number, cell], 1))
        return picked * tf.reduce_sum(at, 1, keepdims=True)

    return _seen(warp)


@splits(images)
def cropped_by_boxes():
    """Boxes of every image, with indices of their images."""

    def crop(x):
        box = tf.tile([[0.1, 0.0, 0.8, 0.9]], [rows(x), 1])
        return tf.image.crop_and_resize(x, box, tf.range(rows(x)), [3, 3])

    return _seen(crop)


@couples(lambda: (normal(6, 6, 2), whole(2, 1).astype("float32")))
def normalized_by_positives():
    """Detection: the loss is divided by the number of positives."""

    def loss(y, p):
        each = keras.losses.binary_crossentropy(y, p, from_logits=True)
        return tf.reduce_sum(each) / tf.maximum(tf.reduce_sum(y), 1.0)  # here

    return _seen(lambda x: x, loss=loss)


@splits(images)
def fixed_filter_of_a_constant():
    """A kernel that is computed in the graph, for all examples the same."""

    def blur(x):
        grid = tf.cast(tf.range(-1, 2), tf.float32)
        line = tf.nn.softmax(-(grid**2))
        kernel = (line[:, None] * line[None])[..., None, None]
        return tf.nn.depthwise_conv2d(
            x, tf.tile(kernel, [1, 1, 4, 1]), [1, 1, 1, 1], "SAME"
        )

    return _seen(blur)


@splits(images)
def kernels_of_each_example():
    """Dynamic convolution: the batch goes to the channels, in groups."""

    def dynamic(x):
        weights = tf.reduce_mean(x, (1, 2))
        flat = tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [1, 6, 6, -1])
        kernel = tf.reshape(weights, [1, 1, -1, 1]) * tf.ones((3, 3, 1, 1))
        out = tf.nn.depthwise_conv2d(flat, kernel, [1, 1, 1, 1], "SAME")
        return tf.transpose(tf.reshape(out, [6, 6, -1, 4]), [2, 0, 1, 3])

    return _seen(dynamic)
