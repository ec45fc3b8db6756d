"""A reduction."""

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.extending import Gradient, Gradients, OnDevice, on_values


def in_float64(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum in float64."""

    def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
        return on_values(gradient, lambda values: tf.cast(values, dtype))

    wide = [[cast(g, tf.float64) for g in tower] for tower in grads]
    sums = OnDevice().all_reduce(wide, devices)
    return [
        [cast(s, g.dtype) for s, g in zip(own, tower, strict=True)]
        for own, tower in zip(sums, grads, strict=True)
    ]
