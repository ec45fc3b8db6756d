"""``SyncBatchNormalization``: statistics of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.step.batch_norm import PooledBatchNormalization
from keras_towers.transport import next_key
from keras_towers.transport.horovod import HorovodTransport


@keras.saving.register_keras_serializable("keras_towers.horovod")
class SyncBatchNormalization(PooledBatchNormalization):
    """``BatchNormalization`` with the statistics of the batches of all ranks.

    In training only, and also where a rank has more examples than another, or
    a mask. All ranks have to call it equally often. The moving statistics are
    the same on all ranks.

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

    def gathered(self, statistics: tf.Tensor) -> tf.Tensor:
        """Concatenate the statistics of all ranks, with gradients."""
        transport = HorovodTransport()

        @tf.custom_gradient
        def gather(mine: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # Each rank's loss depends on what this one has given.
                key = next_key("batch_norm_gradient")
                (total,) = transport.all_reduce([upstream], key)
                # The rank may change in an elastic job.
                return total[hvd.rank_op()][tf.newaxis]

            key = next_key("batch_norm")
            return transport.all_gather(mine, key), gradient

        return gather(statistics)
