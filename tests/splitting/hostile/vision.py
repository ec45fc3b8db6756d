"""Pictures: segmentation, detection, sampling, patches, similarity."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import mse
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


@splits(masks)
def dice_of_each_image():
    def loss(y, p):
        both = tf.reduce_sum(y * p, (1, 2, 3))
        either = tf.reduce_sum(y + p, (1, 2, 3))
        return 1 - (2 * both + 1) / (either + 1)

    return _pixels(loss)


@couples(masks)
def dice_of_the_batch():
    """Flattened first, as most published code does."""

    def loss(y, p):
        y, p = keras.ops.reshape(y, [-1]), keras.ops.reshape(p, [-1])
        both = keras.ops.sum(y * p)
        return 1 - (2 * both + 1) / (keras.ops.sum(y + p) + 1)  # here

    return _pixels(loss)


@couples(masks, says="dice")
def dice_of_keras():
    return _pixels(keras.losses.Dice(name="dice"))


@splits(masks)
def dice_of_keras_for_each():
    return _pixels(keras.losses.Dice(axis=(1, 2, 3)))


@couples(masks)
def balanced_cross_entropy():
    """The weight of the rare class follows from the batch."""

    def loss(y, p):
        rare = tf.reduce_mean(y)
        weight = y * (1 - rare) + (1 - y) * rare  # here
        p = tf.clip_by_value(p, 1e-6, 1 - 1e-6)
        each = y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p)
        return -tf.reduce_mean(weight * each)  # here

    return _pixels(loss)


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
def lovasz_of_each():
    """Errors in order of size, within every image."""

    def loss(y, p):
        y = tf.reshape(y, [-1, 36])
        error = tf.abs(y - tf.reshape(p, [-1, 36]))
        order = tf.argsort(error, direction="DESCENDING")
        error = tf.gather(error, order, batch_dims=1)
        truth = tf.gather(y, order, batch_dims=1)
        total = tf.reduce_sum(truth, 1, keepdims=True)
        left = total - tf.cumsum(truth, 1)
        union = total + tf.cumsum(1 - truth, 1)
        jaccard = 1 - left / tf.maximum(union, 1)
        steps = tf.concat([jaccard[:, :1], jaccard[:, 1:] - jaccard[:, :-1]], 1)
        return tf.reduce_sum(error * steps, 1)

    return _pixels(loss)


@splits(masks)
def structural_similarity():
    def loss(y, p):
        return 1 - tf.image.ssim(y, p, 1.0, filter_size=3)

    return _pixels(loss)


@splits(masks)
def smooth_by_total_variation():
    def loss(y, p):
        return mse(y, p) + 0.01 * tf.reduce_mean(tf.image.total_variation(p))

    return _pixels(loss)


@couples(masks)
def variation_along_the_batch():
    """The axis is off by one: differences between neighbouring images."""

    def loss(y, p):
        steps = p[1:, :] - p[:-1, :]  # here
        return mse(y, p) + 0.1 * tf.reduce_mean(tf.abs(steps))

    return _pixels(loss)


@splits(images)
def patches_of_a_transformer():
    """ViT: patches by reshape and transpose, then attention."""

    def cut(x):
        x = tf.reshape(x, [-1, 3, 2, 3, 2, 4])
        x = tf.transpose(x, [0, 1, 3, 2, 4, 5])
        x = tf.reshape(x, [-1, 9, 16])
        return tf.nn.softmax(x @ tf.transpose(x, [0, 2, 1])) @ x

    return _seen(cut)


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


@couples(images)
def blocks_that_stay_in_the_batch():
    """The mean is taken between both, over the blocks of all pictures."""

    def dilated(x):
        x = tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])
        x = x - tf.reduce_mean(x, 0, keepdims=True)  # here
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


@couples(images)
def sampled_from_the_wrong_image():
    """The index of the batch counts backwards."""

    def warp(x):
        number = rows(x) - 1 - tf.range(rows(x))  # here
        cell = tf.tile([[1, 2]], [rows(x), 1])
        place = tf.concat([number[:, None], cell], 1)
        return x[:, 0, 0] * tf.gather_nd(x, place)  # here

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
