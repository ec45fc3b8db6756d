"""Ranks that do not exist, for steps that are planned and never run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_towers.foundation.object_types import Plain
from keras_towers.transport.engine_transport import EngineTransport


@dataclasses.dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    local_rank: int
    local_size: int


class AbsentRanks(EngineTransport):
    """The last of several ranks, whose towers have the most rows.

    What it adds to a graph has the shapes of an engine's exchanges.

    Args:
        size: the number of ranks.
        local_size: how many of them share its host.
        messages: returns what ``message_bytes`` does, given the number of
            ranks, too; None: as of most engines.
    """

    name = "no engine"
    # Nothing watches them.
    _is_of_all_ranks = False

    def __init__(
        self,
        size: int,
        local_size: int = 1,
        messages: Callable[[str, int, int], int] | None = None,
    ):
        super().__init__(_Place(size - 1, size, local_size - 1, local_size))
        self._messages = messages

    def message_bytes(self, kind: str, size: int) -> int:
        if self._messages is None:
            return super().message_bytes(kind, size)
        return self._messages(kind, size, self.size)

    def engine_sum(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> Sequence[tf.Tensor]:
        return [tf.identity(tensor) for tensor in tensors]

    def engine_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        return tf.concat([tensor for _ in range(self.size)], 0)

    def engine_gather_known(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        # The last rank may have fewer rows than others.
        return tf.zeros([sum(counts), *tensor.shape[1:]], tensor.dtype)

    def engine_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        return tensor[: counts[self.rank]]

    def engine_broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        return [*self.engine_sum(tensors, key)]

    def gather_objects(self, value: Plain) -> list[Plain]:
        return [value]
