"""One process per device, connected by BytePS."""

from __future__ import annotations

import logging

from keras_towers import devices as devices_lib
from keras_towers.fit.contract import Batches, Extent, Updates
from keras_towers.reduction import Exchange, GradientPacker
from keras_towers.reduction import compression as compression_lib
from keras_towers.reduction.compression import CompressionName
from keras_towers.strategies.modes import ModeName
from keras_towers.strategies.processes import (
    ProcessStrategy,
    devices_of_rank,
    share_cores,
)
from keras_towers.transport.byteps import BytePSTransport
from keras_towers.transport.engine import Engine

logger: logging.Logger = logging.getLogger("keras_towers")


class BytePSStrategy(ProcessStrategy):
    """Trains an existing Keras model in several processes, over BytePS.

    Gradients are summed by servers, which run beside the processes that train,
    or on machines without GPUs of their own. All processes run the same script,
    started by ``keras-towers run -np 4 --strategy byteps script.py``, and each
    takes its share of every global batch. The weights are those that one
    process would have trained, up to float rounding, and bit-identical on every
    rank. Metrics and ``History`` are those of the global batch, on every rank.

    Ports tensorpack's ``BytePSTrainer``; the engine is BytePS (Jiang et al., "A
    Unified Architecture for Accelerating Distributed DNN Training in
    Heterogeneous GPU/CPU Clusters", OSDI 2020).

    Args:
        average: True if the loss is a mean over the batch (Keras's default).
            False sums the gradients of the towers.
        compression: how gradients are exchanged. None: without loss. Else as
            for ``HorovodStrategy``.
        sync_every_epoch: at the end of each epoch, average moving statistics
            and broadcast all state from rank 0 again.
        batches: as for ``HorovodStrategy``.
        towers: devices of this process, as for ``HorovodStrategy``.
        exact: as for ``TowerStrategy``.
        batch_norm: as for ``TowerStrategy``.
        random: as for ``TowerStrategy``.
        mode: as for ``TowerStrategy``, for several towers in a process.
        updates: as for ``TowerStrategy``, likewise.
        packer: as for ``TowerStrategy``, likewise.

    Attributes:
        engine: BytePS's module, with the names that it shares with Horovod's:
            ``engine.rank()``, ``engine.size()``.

    Raises:
        TowerError: BytePS is not installed or was built for another
            TensorFlow; the variables that describe the job are missing or
            contradict one another; devices or options that do not exist.

    Example:
        >>> with keras_towers.BytePSStrategy():
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
        transport = BytePSTransport()
        if transport.size == 1 and not transport.was_launched:
            logger.warning(
                "BytePSStrategy trains in a single process, because no "
                "launcher started it: `keras-towers run -np 2 --strategy "
                "byteps script.py` starts two."
            )
        share_cores(transport)
        self.engine: Engine = Engine(transport.module)
        super().__init__(
            transport,
            exchange=compression_lib.resolve(compression),
            towers=devices_of_rank(transport, towers),
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
        """Whether the engine runs over MPI: never."""
        return False
