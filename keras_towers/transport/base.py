"""What a strategy needs of an engine that connects processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class Transport(Protocol):
    """Connects the processes of a job, one call on every rank.

    Every method with a ``key`` is a collective: each rank has to make the same
    call, under the same key, and calls under one key never overlap. The methods
    work eagerly and inside a ``tf.function``.

    Attributes:
        name: what the engine is called, for people.
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those of its machine.
        local_size: number of processes of this machine.
    """

    name: str

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    def mark(self, what: str) -> None:
        """Note what this rank is about to wait in; nothing if empty.

        Ranks that the others wait for can so be named.
        """
        ...

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum each of N dense tensors over the ranks, as each gets ready."""
        ...

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Put the ranks' tensors behind one another on the first dimension.

        The first dimensions may differ.
        """
        ...

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Send the r-th of ``size`` equal parts of the rows to rank r.

        Returns:
            The parts that were sent here, in the order of the ranks.
        """
        ...

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        """Give every rank the tensors of rank ``root``."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank the picklable values of all ranks; eager only."""
        ...
