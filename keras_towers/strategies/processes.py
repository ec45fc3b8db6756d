"""Towers of several processes that train one model together."""

from __future__ import annotations

from typing import Any

from keras_towers.devices import Towers
from keras_towers.reduction import Exchange, exact
from keras_towers.strategies.all_reduce import AllReduceStrategy
from keras_towers.transport import Transport


class ProcessStrategy(AllReduceStrategy):
    """Base of the strategies in which every process drives its own towers.

    It extends ``TowerStrategy`` to several processes: gradients, metrics and
    synchronized statistics are summed first over the towers of each process,
    then over the processes.

    Args:
        transport: connects the processes.
        exchange: how gradients are exchanged between them.
        towers: devices of this process.
        **options: for ``AllReduceStrategy``.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those on its machine, from 0.
        local_size: number of processes on this machine.
        is_chief: whether this is rank 0.
    """

    def __init__(
        self,
        transport: Transport,
        exchange: Exchange = exact,
        towers: Towers | None = 1,
        **options: Any,
    ):
        one_each = transport.size > 1 and towers == 1
        super().__init__(
            towers,
            transport=transport,
            exchange=exchange,
            replicas_are_called="rank" if one_each else "tower",
            **options,
        )

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self._config.transport.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._config.transport.size

    @property
    def local_rank(self) -> int:
        """This process among those on its machine, from 0."""
        return self._config.transport.local_rank

    @property
    def local_size(self) -> int:
        """The number of processes on this machine."""
        return self._config.transport.local_size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self._config.transport.rank == 0

    def __repr__(self) -> str:
        if self.size == 1:
            return super().__repr__()
        return f"{super().__repr__()} in each of {self.size} processes"

    def _described(self) -> list[str]:
        engine = self._config.transport.name
        return [
            *super()._described(),
            f"rank {self.rank} of {self.size} over {engine}; "
            f"{self.num_replicas} towers in total",
        ]
