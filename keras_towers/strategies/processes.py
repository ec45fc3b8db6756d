"""Towers of several processes that train one model together."""

from __future__ import annotations

from typing import Any

from keras_towers.reduction import Exchange, exact
from keras_towers.strategies.all_reduce import AllReduceStrategy
from keras_towers.transport import Transport


class ProcessStrategy(AllReduceStrategy):
    """Base of the strategies in which every process drives its own towers.

    Everything that ``TowerStrategy`` does within a process goes on between the
    processes: gradients, metrics and synchronized statistics are summed over
    the towers of a process in its memory, then over the processes.

    Args:
        transport: connects the processes.
        exchange: how gradients travel between them.
        towers: devices of this process.
        **options: for ``AllReduceStrategy``.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        local_rank: this process among those of its machine.
        local_size: number of processes of this machine.
        is_chief: whether this is rank 0.
    """

    def __init__(
        self,
        transport: Transport,
        exchange: Exchange = exact,
        towers: int | list[int | str] | None = 1,
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
        return self.transport.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.transport.size

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self.transport.local_rank

    @property
    def local_size(self) -> int:
        """The number of processes of this machine."""
        return self.transport.local_size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.transport.rank == 0

    def _described(self) -> list[str]:
        return [
            *super()._described(),
            f"rank {self.rank} of {self.size} over {self.transport.name}; "
            f"{self.num_replicas} towers in all",
        ]
