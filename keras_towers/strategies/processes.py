"""Towers of several processes that train one model together."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Protocol

import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError
from keras_towers.fit.contract import TowerConfig
from keras_towers.reduction import (
    Exchange,
    SharedMemoryExchange,
    exact,
    shared_memory,
)
from keras_towers.reduction import compression as compression_lib
from keras_towers.reduction.compression import CompressionName
from keras_towers.settings import OWN_GPUS
from keras_towers.strategies.all_reduce import AllReduceStrategy
from keras_towers.system import usable_cores
from keras_towers.transport import Transport


class AmongProcesses:
    """What tells a process its place, for strategies of several."""

    _config: TowerConfig

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self._config.peers.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._config.peers.size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0


class ProcessStrategy(AmongProcesses, AllReduceStrategy):
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
        towers: devices_lib.Towers | None = 1,
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
    def local_rank(self) -> int:
        """This process among those on its machine, from 0."""
        return self._config.transport.local_rank

    @property
    def local_size(self) -> int:
        """The number of processes on this machine."""
        return self._config.transport.local_size

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


class Place(Protocol):
    """A process among the others, as a ``Transport`` or a cluster knows it."""

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""
        ...

    @property
    def local_rank(self) -> int:
        """This process among those on its machine, from 0."""
        ...

    @property
    def local_size(self) -> int:
        """The number of processes on this machine."""
        ...


def devices_of_rank(
    place: Place, towers: devices_lib.Towers
) -> devices_lib.Towers:
    """Return this rank's share of the machine's GPUs.

    If TensorFlow has not started yet, it will see no others.

    Args:
        place: this process among the others.
        towers: how many devices, which are assigned by local rank unless the
            launcher shows each rank its own, or names or GPU ids, which are
            returned as they are.

    Returns:
        a number of devices where there are no GPUs, else GPU ids.

    Raises:
        TowerError: the machine has too few GPUs.
    """
    if not isinstance(towers, int):
        return towers
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return towers
    own = os.environ.get(OWN_GPUS)
    first = 0 if own else place.local_rank * towers
    if first + towers > len(gpus):
        raise TowerError(
            f"rank {place.rank} has local rank {place.local_rank} and "
            f"needs {towers} GPU(s), but its machine has only {len(gpus)}: "
            f"start at most {len(gpus) // towers} processes there."
        )
    mine = gpus[first : first + towers]
    # If TensorFlow has already started, the other GPUs stay visible but unused.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices(mine, "GPU")
    if tf.config.get_visible_devices("GPU") == mine:
        return list(range(towers))
    return list(range(first, first + towers))


def exchange_of(
    compression: CompressionName | Exchange | None,
    transport: Transport,
    towers: devices_lib.Towers,
) -> Exchange:
    """Return the exchange that a strategy's ``compression`` asks for.

    Raises:
        TowerError: there is none of that name.
    """
    exchange = compression_lib.resolve(compression)
    on_host = devices_lib.all_on_host(devices_lib.resolve(towers))
    if compression is None and on_host and shared_memory.available(transport):
        return SharedMemoryExchange()
    return exchange


def share_cores(place: Place) -> None:
    """Give every process on a machine its share of the cores."""
    if place.local_size == 1 or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return
    cores = usable_cores()
    # Fails once TensorFlow has started; the launcher sets it earlier.
    with contextlib.suppress(RuntimeError):
        if tf.config.threading.get_intra_op_parallelism_threads() == 0:
            tf.config.threading.set_intra_op_parallelism_threads(
                max(1, cores // place.local_size)
            )
