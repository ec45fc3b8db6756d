"""What a strategy requires of an engine that connects processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class Transport(Protocol):
    """Connects the processes of a job.

    Every method with a ``key`` is a collective: each rank has to make the same
    call with the same key, and calls with one key must never overlap. The
    methods work eagerly and inside a ``tf.function``.

    Attributes:
        name: the display name of the engine.
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those on its machine, from 0.
        local_size: number of processes on this machine.
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
        """Record what this rank is about to wait for; empty: nothing.

        With this, stalled ranks can be named.
        """
        ...

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum each of N dense tensors over the ranks, each when it is ready."""
        ...

    def all_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Concatenate the ranks' tensors, in rank order, on the first axis.

        The first dimensions may differ.
        """
        ...

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Split the rows into ``size`` equal parts and send part r to rank r.

        Returns:
            The parts received, concatenated in rank order.
        """
        ...

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        """Give all ranks the tensors of rank ``root``."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather values from all ranks on all ranks; eager only.

        ``keras_towers.transport.plain`` says which values. It does so for any
        transport, and unpickles nothing.
        """
        ...
