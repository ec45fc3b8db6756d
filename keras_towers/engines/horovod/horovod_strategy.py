"""The strategy of ranks that Horovod connects."""

from __future__ import annotations

from typing import Unpack

from keras_towers.engines.horovod.horovod_transport import HorovodTransport
from keras_towers.fit.options import RankKeywords, options_of
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import launchers
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.device_mesh import ClaimedDevices
from keras_towers.transport import devices as devices_lib


class HorovodStrategy(BaseStrategy):
    """Trains a model in several processes, over Horovod.

    All processes run the same script. Start them with ``keras-towers run -np 4
    script.py``, ``srun``, ``mpirun`` or ``torchrun``. Each takes its share of
    every global batch. The weights equal those of one process, up to float
    rounding, and are bit-identical on every rank. On every rank, metrics and
    ``History`` describe the global batch.

    Ports tensorpack's ``HorovodTrainer``; the engine is Horovod (Sergeev
    and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow", 2018).

    With ``compression=None``, ranks exchange gradients through shared memory if
    all are on one machine without GPUs, else by Horovod.

    Args:
        towers: devices of this process: a number, GPU ids or device names. If
            you give a number on a machine with GPUs, a process takes the GPUs
            of its local rank, unless the launcher (such as Ray) has assigned
            some.
        layouts: a ``keras.distribution.LayoutMap`` on a mesh of this process's
            devices, instead of ``towers``. All processes have such a mesh.
        shard_over: ``"process"``: divide weights in shards within each process,
            rather than over all processes.
        compression: how ranks exchange gradients: None or ``"none"``, without
            loss; ``"fp16"``, ``"bf16"``, ``"power-sgd"``, ..., or a function.
        sync_every: the number of steps after which ranks average their weights,
            instead of exchanging gradients in every step.
        outer_momentum: with ``sync_every``, the momentum of the outer step.
        outer_learning_rate: with ``sync_every``, the outer learning rate.
        **options: the options of ``TowerStrategy`` and the options above;
            ``StrategyOptions`` describes all of them in more detail.

    Raises:
        TowerError: Horovod is not installed or was built for another
            TensorFlow; or a device or option does not exist.

    Example:
        >>> with keras_towers.HorovodStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self, towers: devices_lib.Towers = 1, **options: Unpack[RankKeywords]
    ):
        checked = options_of(self, RankKeywords, options)
        self._horovod = HorovodTransport()
        if self._horovod.size == 1 and launchers.detect() is None:
            logger.warning(
                "HorovodStrategy trains in a single process, because no "
                "launcher started it: `keras-towers run -np 2 script.py` "
                "starts two."
            )
        claimed = ClaimedDevices(self._horovod, towers, checked.layouts)
        self._horovod.try_nccl(claimed.first_gpu)
        super().__init__(claimed.towers(), checked, transport=self._horovod)
        self._compose()

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs over MPI rather than Gloo."""
        return bool(self._horovod.engine.mpi_enabled())
