"""Lossless sums over the processes of one machine, in shared memory.

Over sockets every byte of a gradient is copied in and out of the kernel twice.
In shared memory a rank writes its gradients once, sums its share of the
elements, and reads the sums. The transport only signals that ranks are ready,
and so detects dead ranks as in any other collective.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import pathlib
import secrets
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_towers.reduction.communication_hooks import sum_separately
from keras_towers.transport import Transport
from keras_towers.transport.messages import buckets

logger: logging.Logger = logging.getLogger("keras_towers")

# For less than this, an all-reduce is cheaper than signaling readiness.
MIN_BYTES = 256 * 2**10

# Memory is so fast that synchronizing more often costs more than overlap with
# the backward pass gains.
BUCKET_BYTES = 64 * 2**20


class SharedMemoryAllReduce:
    """A ``CommunicationHook`` for ranks of one machine without GPUs.

    If memory cannot be shared, because there is too little or the ranks are in
    different containers, it falls back to the transport's all-reduce. Small,
    integer and 16-bit gradients always use that.
    """

    def __init__(self):
        self._buckets: dict[tuple, SharedBucket] = {}

    def __call__(
        self, transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum N tensors over the ranks; see ``CommunicationHook``."""
        size = sum(
            t.shape.num_elements() * t.dtype.size
            for t in tensors
            if _can_be_shared(t)
        )
        if size < MIN_BYTES:
            return transport.all_reduce(tensors, key)

        def by_buckets(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sums = list(tensors)
            for n, members in enumerate(buckets(tensors, BUCKET_BYTES)):
                bucket = [tensors[i] for i in members]
                totals = self._sum(transport, bucket, f"{key}.{n}")
                for i, total in zip(members, totals, strict=True):
                    sums[i] = total
            return sums

        return sum_separately(
            transport, tensors, key, _can_be_shared, by_buckets
        )

    def _sum(
        self, transport: Transport, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        lengths = tuple(tensor.shape.num_elements() for tensor in tensors)
        dtype = np.dtype(tensors[0].dtype.as_numpy_dtype)
        form = transport.rank, transport.size, lengths, dtype
        # Shared by all traces.
        if (key, form) not in self._buckets:
            self._buckets[key, form] = SharedBucket(*form)
        bucket = self._buckets[key, form]
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


def available(transport: Transport) -> bool:
    """Whether the ranks seem to share a machine; the same on all ranks."""
    return 1 < transport.size == transport.local_size


def _can_be_shared(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.float32, tf.float64) and bool(
        tensor.shape.num_elements()
    )


FOLDER = pathlib.Path("/dev/shm")

# TensorFlow uses arrays with this alignment without copying them.
_ALIGNMENT = 64


class SharedBucket:
    """Sums one group of arrays over the ranks of a machine.

    Each rank publishes its arrays (post), sums its share of the elements over
    all ranks (reduce), and reads the sums of all shares (collect). The caller
    ensures that no rank starts a phase before all have finished the previous
    one. Each element is summed by a single rank, in a fixed order, so the
    results are bit-identical on every rank.
    """

    def __init__(
        self, rank: int, size: int, lengths: Sequence[int], dtype: np.dtype
    ):
        self._rank, self._size = rank, size
        self._lengths, self._dtype = list(lengths), dtype
        step = _ALIGNMENT // self._dtype.itemsize
        *self._starts, self._total = itertools.accumulate(
            (-(-length // step) * step for length in lengths), initial=0
        )
        self._bounds = [self._total * r // size for r in range(size + 1)]
        self._name = secrets.randbelow(2**62) + 1
        self._own: np.ndarray | None = None
        self._sent: list[np.ndarray] = []
        self._sums: np.ndarray | None = None
        self._names: list[int] = []
        self._failed = False
        self._unlink = weakref.finalize(self, _unlink, _path(self._name))

    def post(self, *arrays: np.ndarray) -> np.int64:
        """Publish the arrays; return the memory's number, 0 if it is full."""
        if self._failed:
            return np.int64(0)
        try:
            if self._own is None:
                self._own = self._map(self._rank, self._name, create=True)
        except OSError as error:
            self._fail(error)
            return np.int64(0)
        for rank in range(self._size):
            if rank != self._rank:
                for place, part in self._parts(rank, arrays):
                    np.copyto(self._own[place], part)
        return np.int64(self._name)

    def reduce(self, names: np.ndarray, *arrays: np.ndarray) -> np.int32:
        """Sum this rank's share; return 1, or 0 if memory is unreadable."""
        try:
            self._open(names)
        except (OSError, ValueError) as error:
            self._fail(error)
            return np.int32(0)
        first, *rest = self._sent
        sums = self._sums
        assert sums is not None  # The bucket is open.
        # Gradients may be infinite; loss scaling deals with that.
        with np.errstate(all="ignore"):
            for place, part in self._parts(self._rank, arrays):
                total = sums[place]
                np.add(part, first[place], out=total)
                for other in rest:
                    np.add(total, other[place], out=total)
        return np.int32(1)

    def collect(self, _: np.int32) -> list[np.ndarray]:
        """Return the sums, in memory that the next ``reduce`` overwrites."""
        # All ranks have mapped the memory: it is freed when they end.
        self._unlink()
        assert self._sums is not None  # After ``reduce``.
        return [
            self._sums[start : start + length]
            for start, length in zip(self._starts, self._lengths, strict=True)
        ]

    def _parts(
        self, rank: int, arrays: Sequence[np.ndarray]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """The share of ``rank``: slices of the bucket, and their values."""
        low, high = self._bounds[rank : rank + 2]
        for start, array in zip(self._starts, arrays, strict=True):
            begin, end = max(low, start), min(high, start + array.size)
            if begin < end:
                part = array.reshape(-1)[begin - start : end - start]
                yield slice(begin, end), part

    def _open(self, names: np.ndarray) -> None:
        if self._failed or not all(names):
            raise OSError("a rank could not allocate shared memory")
        if self._sums is not None:
            if list(names) != self._names:
                raise OSError("a rank was replaced by another process")
            return
        assert self._own is not None  # After ``post``.
        maps = [
            self._own if r == self._rank else self._map(r, name, create=False)
            for r, name in enumerate(names)
        ]
        self._sent = [m for r, m in enumerate(maps) if r != self._rank]
        self._sums = maps[0][self._total :]
        self._names = list(names)

    def _map(self, rank: int, name: int, create: bool) -> np.ndarray:
        """Map a rank's memory; rank 0's memory also holds the sums."""
        count = self._total * (2 if rank == 0 else 1)
        size = count * self._dtype.itemsize
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(_path(name), flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size)
                # Nobody else sums this rank's share.
                low, high = self._bounds[rank : rank + 2]
                for begin, end in ((0, low), (high, count)):
                    if begin < end:
                        # Fails if there is no room; a later write would kill
                        # us.
                        os.posix_fallocate(
                            descriptor,
                            begin * self._dtype.itemsize,
                            (end - begin) * self._dtype.itemsize,
                        )
            return np.frombuffer(mmap.mmap(descriptor, size), self._dtype)
        finally:
            os.close(descriptor)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            logger.debug("not using shared memory for gradients: %s", error)
        self._failed = True
        self._unlink()


def _path(name: int) -> pathlib.Path:
    return FOLDER / f"keras-towers-{name:x}"


def _unlink(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
