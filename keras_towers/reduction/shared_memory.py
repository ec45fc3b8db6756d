"""Exact sums over the processes of one machine, through its memory.

Over sockets every byte of a gradient is copied in and out of the kernel twice.
In shared memory a rank writes its gradients once, sums its part of all, and
reads the sums. The transport carries only the word that a rank is ready, so
that a rank that died is found as in any of its collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.reduction.exchange import buckets
from keras_towers.reduction.segments import SharedBucket
from keras_towers.transport import Transport

# Below it one small all-reduce costs less than the words that ranks are ready.
MIN_BYTES = 256 * 2**10

# Memory is so fast that being ready together, a few times a step, costs more
# than what overlaps with the backward pass wins.
BUCKET_BYTES = 64 * 2**20


class SharedMemoryExchange:
    """An ``Exchange`` of ranks that all are on one machine, without GPUs.

    Where memory cannot be shared, be it that there is too little or that the
    ranks turn out to live in different containers, the transport's all-reduce
    sums. Small, integer and 16-bit gradients are always summed by it.

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
        sums: dict[int, tf.Tensor] = {}
        for number, members in enumerate(
            buckets(tensors, shared, BUCKET_BYTES)
        ):
            totals = self._sum(
                transport, [tensors[i] for i in members], f"{key}.{number}"
            )
            sums.update(zip(members, totals, strict=True))
        others = [i for i in range(len(tensors)) if i not in sums]
        if others:
            totals = transport.all_reduce(
                [tensors[i] for i in others], f"{key}.others"
            )
            sums.update(zip(others, totals, strict=True))
        return [sums[i] for i in range(len(tensors))]

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
            # An operation that works in place would write what others read.
            return [
                tf.reshape(tf.raw_ops.DeepCopy(x=view), t.shape)
                for view, t in zip(
                    # Eagerly, one view comes without a list around it.
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
        """A bucket for a key and these lengths, over all traces of a step."""
        lengths = tuple(tensor.shape.num_elements() for tensor in tensors)
        place = transport.rank, transport.size
        form = key, place, tensors[0].dtype, lengths
        if form not in self._buckets:
            self._buckets[form] = SharedBucket(
                *place,
                lengths,
                tensors[0].dtype.as_numpy_dtype,
            )
        return self._buckets[form]


def available(transport: Transport) -> bool:
    """Whether the ranks seem to be on one machine.

    All ranks get the same answer, as all must exchange in the same way.
    """
    return 1 < transport.size == transport.local_size


def _can_be_shared(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.float32, tf.float64) and bool(
        tensor.shape.num_elements()
    )
