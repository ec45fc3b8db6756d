"""Loss denominators over the global batch.

A tower's loss is weighted by its share of the examples. That is exact if the
loss divides by a multiple of the number of examples, but not for a sum, a mean
over sample weights or a mean over unmasked entries. These two functions replace
Keras's on towers, so that the weighted mean of the towers' losses is the loss
of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.fit.context import tower as tower_lib

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def reduce_values(
    original: Callable,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
) -> tf.Tensor:
    """Replace Keras's ``reduce_values`` on a tower."""
    tower = tower_lib.with_a_share()
    if (
        tower is None
        or not tower.average
        or reduction not in (*_MEANS, "sum")
        or values.shape.rank == 0
    ):
        return original(values, sample_weight, reduction)
    if reduction == "sum":
        total = tf.ones((), values.dtype)
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = _over_towers(tf.reduce_sum(sample_weight))
    elif values.shape[1:].is_fully_defined():
        return original(values, sample_weight, reduction)
    else:
        total = _over_towers(tf.cast(tf.size(values), values.dtype))
    share = tf.cast(tower.share, values.dtype)
    return tf.math.divide_no_nan(
        tf.reduce_sum(values), tf.cast(total, values.dtype) * share
    )


def apply_mask(
    original: Callable,
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None,
    dtype: Any,
    reduction: str | None,
) -> tf.Tensor | None:
    """Replace Keras's ``apply_mask``, which turns a mask into sample weights.

    Keras weights valid entries by total / valid, so that the mean over all
    entries becomes the mean over the valid ones. On a tower both numbers have
    to be those of the global batch.
    """
    weights = original(sample_weight, mask, dtype=dtype, reduction=reduction)
    tower = tower_lib.with_a_share()
    if (
        tower is None
        or not tower.average
        or mask is None
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return weights
    total = tf.cast(tf.size(mask), dtype)
    valid = tf.reduce_sum(tf.cast(mask, dtype))
    here = tf.math.divide_no_nan(total, valid)
    everywhere = tf.math.divide_no_nan(_over_towers(total), _over_towers(valid))
    return weights * tf.math.divide_no_nan(everywhere, here)


def _over_towers(count: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().sum_counts(count)
