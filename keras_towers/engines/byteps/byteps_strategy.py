"""The strategy of ranks that BytePS connects."""

from __future__ import annotations

from typing import Unpack

from keras_towers.engines.byteps.byteps_transport import BytePSTransport
from keras_towers.fit.options import RankKeywords, options_of
from keras_towers.foundation.notices import logger
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.device_mesh import ClaimedDevices
from keras_towers.transport import devices as devices_lib


class BytePSStrategy(BaseStrategy):
    """Trains a model in several processes, over BytePS.

    Servers sum the gradients. They run beside the processes that train, or on
    spare machines without GPUs. All processes run the same script. Start them
    with ``keras-towers run -np 4 --strategy byteps script.py``. Each takes its
    share of every global batch. Results equal those of one process, as with
    ``HorovodStrategy``. With ``compression=None``, servers sum gradients
    without loss, as with ``compression="none"``.

    Ports tensorpack's ``BytePSTrainer``; the engine is BytePS (Jiang et al., "A
    Unified Architecture for Accelerating Distributed DNN Training in
    Heterogeneous GPU/CPU Clusters", OSDI 2020).

    Args:
        towers: as for ``HorovodStrategy``.
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
        TowerError: BytePS is not installed or was built for another
            TensorFlow; the variables that describe the job are missing or
            contradict one another; or a device or option does not exist.

    Example:
        >>> with keras_towers.BytePSStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self, towers: devices_lib.Towers = 1, **options: Unpack[RankKeywords]
    ):
        # The default would bypass the servers if ranks share memory.
        options["compression"] = options.get("compression") or "none"
        checked = options_of(self, RankKeywords, options)
        transport = BytePSTransport()
        if transport.size == 1 and not transport.is_launched:
            logger.warning(
                "BytePSStrategy trains in a single process, because no "
                "launcher started it: `keras-towers run -np 2 --strategy "
                "byteps script.py` starts two."
            )
        claimed = ClaimedDevices(transport, towers, checked.layouts)
        super().__init__(claimed.towers(), checked, transport=transport)
        self._compose()
