"""Memory that the processes of a machine share, and sums in it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pathlib
from collections.abc import Sequence

import numpy as np

FOLDER = pathlib.Path("/dev/shm")

# TensorFlow uses an array without a copy if it begins at such an address.
_ALIGNMENT = 64


class SharedBucket:
    """Sums one group of arrays over the ranks of a machine.

    Every rank writes its arrays where the others see them (``post``), sums its
    own part of all (``reduce``), and reads the parts of all (``collect``). The
    caller sees to it that no rank begins one before all have ended the one
    before. Each element is summed by one rank, in one order, so that all ranks
    read the same bits.

    A method that cannot do its work gives 0 in place of 1.

    Args:
        name: the group's name, the same on all ranks, of this job alone.
        rank: this process.
        size: number of processes.
        lengths: number of elements of each array.
        dtype: their dtype.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        lengths: Sequence[int],
        dtype: np.dtype,
    ):
        self._name, self._rank, self._size = name, rank, size
        self._lengths, self._dtype = list(lengths), np.dtype(dtype)
        step = _ALIGNMENT // self._dtype.itemsize
        *self._starts, self._total = itertools.accumulate(
            (-(-length // step) * step for length in lengths), initial=0
        )
        self._bounds = [self._total * r // size for r in range(size + 1)]
        self._sent: list[np.ndarray] = []
        self._own: np.ndarray | None = None
        self._sums: np.ndarray | None = None
        self._failed = False

    def post(self, *arrays: np.ndarray) -> np.int32:
        """Write what the other ranks are to sum."""
        if self._failed:
            return np.int32(0)
        try:
            if self._own is None:
                self._own = self._map(self._rank, create=True)
        except OSError:
            self._fail()
            return np.int32(0)
        for rank in range(self._size):
            if rank != self._rank:
                for place, part in self._parts(rank, arrays):
                    np.copyto(self._own[place], part)
        return np.int32(1)

    def reduce(self, posted: np.int32, *arrays: np.ndarray) -> np.int32:
        """Sum this rank's part, once ``posted`` ranks have written theirs."""
        if posted < self._size or not self._opened():
            self._fail()
            return np.int32(0)
        first, *rest = self._sent
        for place, part in self._parts(self._rank, arrays):
            total = self._sums[place]
            np.add(part, first[place], out=total)
            for other in rest:
                np.add(total, other[place], out=total)
        return np.int32(1)

    def collect(self, _: np.int32) -> list[np.ndarray]:
        """The sums, in memory that the next ``reduce`` overwrites."""
        # All ranks have it open; without a name it ends with the processes.
        self._unlink()
        return [
            self._sums[start : start + length]
            for start, length in zip(self._starts, self._lengths, strict=True)
        ]

    def _parts(self, rank: int, arrays: Sequence[np.ndarray]):
        """What rank ``rank`` sums: places in the bucket, and their values."""
        low, high = self._bounds[rank : rank + 2]
        for start, array in zip(self._starts, arrays, strict=True):
            begin, end = max(low, start), min(high, start + array.size)
            if begin < end:
                part = array.reshape(-1)[begin - start : end - start]
                yield slice(begin, end), part

    def _opened(self) -> bool:
        if self._sums is not None:
            return True
        try:
            maps = [
                self._own if r == self._rank else self._map(r, create=False)
                for r in range(self._size)
            ]
        except (OSError, ValueError):
            return False
        self._sent = [m for r, m in enumerate(maps) if r != self._rank]
        self._sums = maps[0][self._total :]
        return True

    def _map(self, rank: int, create: bool) -> np.ndarray:
        """The memory of a rank; that of rank 0 has room for the sums too."""
        count = self._total * (2 if rank == 0 else 1)
        size = count * self._dtype.itemsize
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(self._path(rank), flags, 0o600)
        try:
            if create:
                # Without room this fails; a later write would kill the process.
                os.posix_fallocate(descriptor, 0, size)
            return np.frombuffer(mmap.mmap(descriptor, size), self._dtype)
        finally:
            os.close(descriptor)

    def _path(self, rank: int) -> pathlib.Path:
        return FOLDER / f"{self._name}.{rank}"

    def _fail(self) -> None:
        self._failed = True
        self._unlink()

    def _unlink(self) -> None:
        if self._own is not None or self._failed:
            with contextlib.suppress(OSError):
                self._path(self._rank).unlink()
