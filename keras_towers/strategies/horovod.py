"""One process per device, connected by Horovod."""

from __future__ import annotations

import logging

from keras_towers import devices as devices_lib
from keras_towers.fit.contract import Batches, Extent, Updates
from keras_towers.reduction import Exchange, GradientPacker
from keras_towers.reduction.compression import CompressionName
from keras_towers.strategies.modes import ModeName
from keras_towers.strategies.processes import (
    ProcessStrategy,
    devices_of_rank,
    exchange_of,
    share_cores,
)
from keras_towers.transport import Transport
from keras_towers.transport import horovod as horovod_lib

logger: logging.Logger = logging.getLogger("keras_towers")


class HorovodStrategy(ProcessStrategy):
    """Trains an existing Keras model in several processes, over Horovod.

    All processes run the same script, started by ``keras-towers run -np 4
    script.py``, ``srun``, ``mpirun`` or ``torchrun``. Each takes its share of
    every global batch. The weights are those that one process would have
    trained, up to float rounding, and bit-identical on every rank. Metrics and
    ``History`` are those of the global batch, on every rank.

    Ports tensorpack's ``HorovodTrainer``; the engine is Horovod (Sergeev
    and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow", 2018).

    Args:
        average: True if the loss is a mean over the batch (Keras's default).
            False sums the gradients of the towers.
        compression: how gradients are exchanged. None: without loss, through
            shared memory if all ranks are on one machine without GPUs, else by
            Horovod. ``"none"``: without loss, always by Horovod. ``"fp16"``,
            ``"fp16-shards"``, ``"bf16"``, ``"fp16-feedback"``,
            ``"bf16-feedback"`` or a function: see
            ``keras_towers.reduction.compression``. Sparse gradients, metrics
            and statistics are never compressed.
        sync_every_epoch: at the end of each epoch, average moving statistics
            and broadcast all state from rank 0 again.
        batches: ``"split"``: all ranks get the same data, and each takes its
            share of every batch. ``"each"``: every rank reads its own data,
            and the ranks' batches together are the global batch; the number of
            batches may differ between ranks.
        towers: devices of this process: a number, GPU ids or device names. On
            a machine with GPUs, they are assigned to ranks by local rank, if
            the launcher (Ray does) has not done it.
        exact: as for ``TowerStrategy``.
        batch_norm: as for ``TowerStrategy``.
        random: as for ``TowerStrategy``.
        mode: as for ``TowerStrategy``, for several towers in a process.
        updates: as for ``TowerStrategy``, likewise.
        packer: as for ``TowerStrategy``, likewise.

    Raises:
        TowerError: Horovod is not installed or was built for another
            TensorFlow; devices or options that do not exist.

    Example:
        >>> with keras_towers.HorovodStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        average: bool = True,
        compression: CompressionName | Exchange | None = None,
        sync_every_epoch: bool = True,
        batches: Batches = "split",
        towers: devices_lib.Towers = 1,
        *,
        exact: bool = False,
        batch_norm: Extent | None = None,
        random: Extent | None = None,
        mode: ModeName | None = None,
        updates: Updates | None = None,
        packer: GradientPacker | bool | None = None,
    ):
        self._horovod = transport = horovod_lib.HorovodTransport()
        _say_how_to_launch(transport)
        share_cores(transport)
        towers = devices_of_rank(transport, towers)
        super().__init__(
            transport,
            exchange=exchange_of(compression, transport, towers),
            towers=towers,
            average=average,
            sync_every_epoch=sync_every_epoch,
            batches=batches,
            exact=exact,
            batch_norm=batch_norm,
            random=random,
            mode=mode,
            updates=updates,
            packer=packer,
        )

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs over MPI rather than Gloo."""
        return self._horovod.mpi_enabled()


def _say_how_to_launch(transport: Transport) -> None:
    if transport.size == 1 and not horovod_lib.was_launched():
        logger.warning(
            "HorovodStrategy trains in a single process, because no launcher "
            "started it: `keras-towers run -np 2 script.py` starts two."
        )
