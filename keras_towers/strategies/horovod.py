"""One process per device, connected by Horovod."""

from __future__ import annotations

import logging

from keras_towers.devices import Towers
from keras_towers.strategies.processes import devices_of_rank, share_cores
from keras_towers.strategies.ranks import RankStrategy
from keras_towers.transport import Transport
from keras_towers.transport import horovod as horovod_lib

logger: logging.Logger = logging.getLogger("keras_towers")


class HorovodStrategy(RankStrategy):
    """Trains an existing Keras model in several processes, over Horovod.

    All processes run the same script, started by ``keras-towers run -np 4
    script.py``, ``srun``, ``mpirun`` or ``torchrun``. Each takes its share of
    every global batch. The weights are those that one process would have
    trained, up to float rounding, and bit-identical on every rank. Metrics and
    ``History`` are those of the global batch, on every rank.

    Ports tensorpack's ``HorovodTrainer``; the engine is Horovod (Sergeev
    and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow", 2018).

    With ``compression=None`` gradients are exchanged through shared memory if
    all ranks are on one machine without GPUs, else by Horovod.

    Raises:
        TowerError: Horovod is not installed or was built for another
            TensorFlow; devices or options that do not exist.

    Example:
        >>> with keras_towers.HorovodStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def _connect(self, towers: Towers) -> tuple[Transport, Towers]:
        self._horovod = horovod_lib.HorovodTransport()
        _say_how_to_launch(self._horovod)
        share_cores(self._horovod)
        return self._horovod, devices_of_rank(self._horovod, towers)

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs over MPI rather than Gloo."""
        return self._horovod.mpi_enabled()


def _say_how_to_launch(transport: Transport) -> None:
    if transport.size == 1 and not horovod_lib.was_launched():
        logger.warning(
            "HorovodStrategy trains in a single process, because no launcher "
            "started it: `keras-towers run -np 2 script.py` starts two."
        )
