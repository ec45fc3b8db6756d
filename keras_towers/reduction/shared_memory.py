"""Lossless sums over the processes of one machine, in shared memory.

Over sockets every byte of a gradient is copied in and out of the kernel twice.
In shared memory a rank writes its gradients once, sums its share of the
elements, and reads the sums. The transport only signals that ranks are ready,
and so detects dead ranks as in any other collective.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import pathlib
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_towers.foundation.notices import logger
from keras_towers.reduction.compression_hooks import sum_separately
from keras_towers.transport import Transport
from keras_towers.transport.memory_turns import Turns
from keras_towers.transport.messages import group_by_bytes

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
        # One is filled while the other one is read.
        self._turns = Turns(2)
        self._memories: dict[tuple[str, int, int], SharedMemory] = {}

    @property
    def kept_bytes(self) -> int:
        """The bytes of all segments that this rank uses."""
        return sum(memory.bytes for memory in self._memories.values())

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

        def bucket_by_bucket(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sums = list(tensors)
            for n, members in enumerate(group_by_bytes(tensors, BUCKET_BYTES)):
                sum_bucket = functools.partial(
                    self._sum,
                    transport,
                    [tensors[i] for i in members],
                    f"{key}.{n}",
                )
                totals = self._turns.take(sum_bucket)
                for i, total in zip(members, totals, strict=True):
                    sums[i] = total
            return sums

        return sum_separately(
            transport, tensors, key, _can_be_shared, bucket_by_bucket
        )

    def _sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        key: str,
        memory: str,
    ) -> list[tf.Tensor]:
        rank, size = transport.rank, transport.size
        # Shared by all traces.
        shared = self._memories.setdefault(
            (memory, rank, size), SharedMemory(rank, size)
        )
        shapes: Any = [tensor.shape.as_list() for tensor in tensors]
        bucket = SharedBucket(
            shared,
            shapes,
            np.dtype(tensors[0].dtype.as_numpy_dtype),
        )
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
            # Eagerly, a single view is not wrapped in a list.
            totals = [
                tf.raw_ops.DeepCopy(x=view) for view in tf.nest.flatten(views)
            ]
            for total, tensor in zip(totals, tensors, strict=True):
                total.set_shape(tensor.shape)
            return totals

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


class Room(NamedTuple):
    """The size of a segment, in bytes.

    Attributes:
        sums: for sums, at its beginning.
        posted: for what its rank posts, at its end.
    """

    sums: int
    posted: int

    def holds(self, other: Room) -> bool:
        """Whether it is at least as large as another one."""
        return self.sums >= other.sums and self.posted >= other.posted


class SharedMemory:
    """A shared memory segment for each rank of a machine, for all buckets.

    A segment is as large as the largest bucket that was known when it was
    created; a larger bucket replaces it. What a rank posts of a bucket never
    overlaps the sums of the bucket before, which others may still read.

    Args:
        rank: this rank.
        size: the number of ranks.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        segments: the bytes of each rank's segment.
        remove_name: removes the name of this rank's segment, so that it is
            freed at the end. All ranks have it open by then.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._largest = self._own = Room(0, 0)
        self._has_failed = False
        # The names of all segments; 0: unknown.
        self._names = [0] * size
        self.segments: list[np.ndarray] = [np.empty(0, np.uint8)] * size
        self.remove_name: Callable[[], object] = lambda: None

    @property
    def bytes(self) -> int:
        """What this rank uses: all sums, and what it posts and reads."""
        posted, others = self._largest.posted, self.size - 1
        whole = posted * self.size // others if others else 0
        return 0 if self._has_failed else whole + 2 * posted

    def reserve(self, room: Room) -> None:
        """Reserve space for a bucket in this rank's segment."""
        self._largest = Room(*map(max, self._largest, room))

    def publish(self, room: Room) -> int:
        """Return the name of this rank's segment; 0 if there is no memory.

        Args:
            room: what it needs at least.
        """
        if not self._has_failed and not self._own.holds(room):
            try:
                self._create(self._largest)
            except OSError as error:
                self._fail(error)
        return 0 if self._has_failed else self._names[self.rank]

    def _create(self, room: Room) -> None:
        self.remove_name()
        name = secrets.randbelow(2**62) + 1
        self.remove_name = weakref.finalize(self, _remove, _path(name))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with _opened(name, flags) as descriptor:
            # Fails if there is no room; a later write would kill us.
            os.posix_fallocate(descriptor, 0, sum(room))
            self.segments[self.rank] = _mapped(descriptor)
        self._names[self.rank], self._own = name, room

    def open(self, names: Sequence[int]) -> bool:
        """Open the segments of all ranks; return whether that succeeded."""
        try:
            if self._has_failed or not all(names):
                raise OSError("a rank could not allocate shared memory")
            for rank, name in enumerate(names):
                if name != self._names[rank]:
                    self.segments[rank] = self._map(name)
                    self._names[rank] = name
        except (OSError, ValueError) as error:
            self._fail(error)
        return not self._has_failed

    def _map(self, name: int) -> np.ndarray:
        with _opened(name, os.O_RDWR) as descriptor:
            return _mapped(descriptor)

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            logger.debug("not using shared memory for gradients: %s", error)
        self._has_failed = True
        self.remove_name()


class SharedBucket:
    """Sums one group of arrays over the ranks of a machine.

    Each rank publishes its arrays (post), sums its share of the elements over
    all ranks (reduce), and reads the sums of all shares (collect). The caller
    ensures that no rank starts a phase before all have finished the previous
    one. Each element is summed by a single rank, in a fixed order, so the
    results are bit-identical on every rank.

    Each rank's segment has what the other ranks sum, in their order. That of
    rank 0 has all sums, too.
    """

    def __init__(
        self,
        memory: SharedMemory,
        shapes: Sequence[Sequence[int]],
        dtype: np.dtype,
    ):
        self._memory = memory
        self._shapes, self._dtype = shapes, dtype
        lengths = [*map(math.prod, shapes)]
        step = _ALIGNMENT // self._dtype.itemsize
        *self._starts, self._total = itertools.accumulate(
            (-(-length // step) * step for length in lengths), initial=0
        )
        size = memory.size
        self._bounds = [self._total * r // size for r in range(size + 1)]
        self._posts = [
            self._total - (high - low)
            for low, high in itertools.pairwise(self._bounds)
        ]
        sums = self._total if memory.rank == 0 else 0
        self._room = Room(
            *(
                -(-count // step) * _ALIGNMENT
                for count in (sums, self._posts[memory.rank])
            )
        )
        memory.reserve(self._room)

    def post(self, *arrays: np.ndarray) -> np.int64:
        """Publish the arrays; return the memory's name, 0 if it is full."""
        name, mine = self._memory.publish(self._room), self._memory.rank
        for rank in range(self._memory.size) if name else ():
            if rank != mine:
                posted = self._posted(mine, rank)
                for place, part in self._parts(rank, arrays):
                    np.copyto(posted[place], part)
        return np.int64(name)

    def reduce(self, names: np.ndarray, *arrays: np.ndarray) -> np.int32:
        """Sum this rank's share; return 1, or 0 if memory is unreadable."""
        if not self._memory.open(names.tolist()):
            return np.int32(0)
        mine = self._memory.rank
        first, *rest = (
            self._posted(rank, mine)
            for rank in range(self._memory.size)
            if rank != mine
        )
        low, high = self._bounds[mine:][:2]
        sums = self._sums[low:high]
        # Gradients may be infinite; loss scaling deals with that.
        with np.errstate(all="ignore"):
            for place, part in self._parts(mine, arrays):
                total = sums[place]
                np.add(part, first[place], out=total)
                for other in rest:
                    np.add(total, other[place], out=total)
        return np.int32(1)

    def collect(self, _: np.int32) -> list[np.ndarray]:
        """Return the sums, in memory that the next bucket overwrites."""
        self._memory.remove_name()
        return [
            self._sums[start:][: math.prod(shape)].reshape(shape)
            for start, shape in zip(self._starts, self._shapes, strict=True)
        ]

    @property
    def _sums(self) -> np.ndarray:
        size = self._total * self._dtype.itemsize
        return self._memory.segments[0][:size].view(self._dtype)

    def _posted(self, rank: int, share: int) -> np.ndarray:
        """Return one rank's values of the share of another rank."""
        size = self._posts[rank] * self._dtype.itemsize
        posted = self._memory.segments[rank][-size:].view(self._dtype)
        low, high = self._bounds[share:][:2]
        # It does not post its own share.
        before = self._total - self._posts[rank] if share > rank else 0
        return posted[low - before : high - before]

    def _parts(
        self, rank: int, arrays: Sequence[np.ndarray]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Return slices of the share of ``rank``, and their values."""
        low, high = self._bounds[rank:][:2]
        for start, array in zip(self._starts, arrays, strict=True):
            begin, end = max(low, start), min(high, start + array.size)
            if begin < end:
                part = array.reshape(-1)[begin - start : end - start]
                yield slice(begin - low, end - low), part


@contextlib.contextmanager
def _opened(name: int, flags: int) -> Iterator[int]:
    descriptor = os.open(_path(name), flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)


def _path(name: int) -> pathlib.Path:
    return FOLDER / f"keras-towers-{name:x}"


def _remove(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
