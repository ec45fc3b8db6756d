"""The sum of IndexedSlices: the concatenation of all slices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.reduction.placed import copy_to


def sum_slices(
    slices: Sequence[tf.IndexedSlices], main: str, devices: Sequence[str]
) -> list[tf.IndexedSlices]:
    """Sum the slices of K towers on one device and copy them to each.

    The slices are only concatenated: a row may occur several times, and
    optimizers add repeated rows up. TensorFlow does the same if a variable is
    gathered from twice.

    Args:
        slices: K ``tf.IndexedSlices`` of one variable; each tower may have a
            different number of rows.
        main: the device on which they are concatenated.
        devices: K device names.

    Returns:
        K equal ``tf.IndexedSlices`` with the rows of all towers, tower 0's
        first.

    Example:
        >>> one = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([4]))
        >>> two = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 7]))
        >>> devices = ["/device:CPU:0", "/device:CPU:1"]
        >>> total, _ = sum_slices([one, two], devices[0], devices)
        >>> total.indices.numpy()
        array([4, 4, 7], dtype=int32)
    """
    with tf.device(main):
        values = tf.concat([part.values for part in slices], axis=0)
        indices = tf.concat([part.indices for part in slices], axis=0)
    return [
        tf.IndexedSlices(
            copy_to(device, values),
            copy_to(device, indices),
            slices[0].dense_shape,
        )
        for device in devices
    ]
