"""``SyncBatchNormalization``: batch statistics over all ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.engines.horovod.horovod_strategy import HorovodTransport
from keras_towers.errors import TowerError
from keras_towers.transport import next_key


@keras.saving.register_keras_serializable("keras_towers.horovod")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``BatchNormalization`` with statistics of all ranks' batches in training.

    Ranks may have batches of different sizes, and masks. All ranks have to call
    the layer equally often. The moving statistics are the same on all ranks.

    Args:
        fused: there is no fused form.
        **kwargs: as for ``keras.layers.BatchNormalization``.

    Raises:
        TowerError: ``fused`` is True or None.

    Example:
        >>> layer = hvd.SyncBatchNormalization(momentum=0.9)
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any):
        if fused in (True, None):
            raise TowerError(
                f"SyncBatchNormalization has no fused form: fused={fused}. "
                "Leave it out."
            )
        super().__init__(**kwargs)

    # Keras computes the statistics of each rank. They are combined by the rule
    # of Chan, Golub and LeVeque, which does not cancel if the mean is large.
    def _moments(
        self, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        moments = super()._moments(inputs, mask)
        if compat.in_stateless_scope():  # Keras infers a shape.
            return moments
        mean, variance = (tf.reshape(moment, [-1]) for moment in moments)
        if mask is None:
            values = tf.size(inputs)
        else:
            per_entry = tf.size(inputs) // tf.maximum(tf.size(mask), 1)
            values = per_entry * tf.math.count_nonzero(mask, dtype=tf.int32)
        count = tf.cast(values / tf.size(mean), mean.dtype)
        # Makes the exchange follow the previous step of a loop.
        with tf.control_dependencies([self.moving_mean._value.read_value()]):
            statistics = tf.stack([mean, variance, tf.ones_like(mean) * count])
        ranks = _gather(statistics[tf.newaxis])
        means, variances, counts = tf.unstack(ranks, axis=1)
        shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))
        mean = tf.reduce_sum(shares * means, 0)
        between = tf.math.squared_difference(means, mean)
        return mean, tf.reduce_sum(shares * (variances + between), 0)


@tf.custom_gradient
def _gather(statistics: tf.Tensor) -> Any:
    """Concatenate the rows [1, 3, channels] of all ranks."""
    transport = HorovodTransport()

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        # Every rank's loss depends on this rank's statistics.
        key = next_key("batch_norm_gradient")
        (total,) = transport.all_reduce([upstream], key)
        # The rank may change in an elastic job.
        return total[hvd.rank_op()][tf.newaxis]

    return transport.all_gather(statistics, next_key("batch_norm")), gradient
