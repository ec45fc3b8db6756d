"""Lossless sums over the processes of one machine, in shared memory.

Over sockets every byte of a gradient is copied in and out of the kernel twice.
In shared memory a rank writes its gradients once, sums its share of the
elements, and reads the sums. The transport only signals that ranks are ready,
and so detects dead ranks as in any other collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_towers.reduction.exchange import in_buckets
from keras_towers.reduction.segments import SharedBucket
from keras_towers.transport import Transport

# For less than this, an all-reduce is cheaper than signalling readiness.
MIN_BYTES = 256 * 2**10

# Memory is so fast that synchronizing more often costs more than overlap with
# the backward pass gains.
BUCKET_BYTES = 64 * 2**20


class SharedMemoryExchange:
    """An ``Exchange`` for ranks that are all on one machine, without GPUs.

    If memory cannot be shared, because there is too little or the ranks are in
    different containers, it falls back to the transport's all-reduce. Small,
    integer and 16-bit gradients always use that.

    Example:
        >>> exchange = SharedMemoryExchange()
        >>> sums = exchange(transport, gradients, "kt.sum.1")
    """

    def __init__(self):
        self._buckets: dict[tuple, SharedBucket] = {}

    def __call__(
        self, transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum N tensors over the ranks; see ``Exchange``."""
        shared = [i for i, t in enumerate(tensors) if _can_be_shared(t)]
        size = sum(
            tensors[i].shape.num_elements() * tensors[i].dtype.size
            for i in shared
        )
        if size < MIN_BYTES:
            return transport.all_reduce(tensors, key)
        return in_buckets(
            self._sum,
            transport,
            tensors,
            key,
            chosen=shared,
            others=[i for i in range(len(tensors)) if i not in set(shared)],
            limit=BUCKET_BYTES,
        )

    def _sum(
        self, transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        bucket = self._bucket(transport, tensors, key)

        name = tf.numpy_function(bucket.post, tensors, tf.int64)
        names = transport.all_gather(tf.reshape(name, [1]), f"{key}.posted")
        done = tf.numpy_function(bucket.reduce, [names, *tensors], tf.int32)
        (ranks,) = transport.all_reduce(
            [tf.ensure_shape(done, [])], f"{key}.reduced"
        )

        def collect():
            views = tf.numpy_function(
                bucket.collect, [ranks], [t.dtype for t in tensors]
            )
            # An in-place operation would overwrite what other ranks read.
            return [
                tf.reshape(tf.raw_ops.DeepCopy(x=view), t.shape)
                for view, t in zip(
                    # Eagerly, a single view is not wrapped in a list.
                    tf.nest.flatten(views),
                    tensors,
                    strict=True,
                )
            ]

        return tf.cond(
            tf.equal(ranks, transport.size),
            collect,
            lambda: transport.all_reduce(tensors, f"{key}.plain"),
        )

    def _bucket(
        self, transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> SharedBucket:
        """The bucket for a key and these lengths, shared by all traces."""
        lengths = tuple(tensor.shape.num_elements() for tensor in tensors)
        place = transport.rank, transport.size
        form = key, place, tensors[0].dtype, lengths
        if form not in self._buckets:
            self._buckets[form] = SharedBucket(
                *place,
                lengths,
                np.dtype(tensors[0].dtype.as_numpy_dtype),
            )
        return self._buckets[form]


def available(transport: Transport) -> bool:
    """Whether the ranks appear to be on one machine.

    All ranks get the same answer, because all must use the same exchange.
    """
    return 1 < transport.size == transport.local_size


def _can_be_shared(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.float32, tf.float64) and bool(
        tensor.shape.num_elements()
    )
