"""One process a device, connected by Horovod."""

from __future__ import annotations

import contextlib
import logging
import os

import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers.cores import usable_cores
from keras_towers.errors import TowerError
from keras_towers.reduction import Exchange, SharedMemoryExchange, shared_memory
from keras_towers.reduction import compression as compression_lib
from keras_towers.strategies.processes import ProcessStrategy
from keras_towers.transport import Transport
from keras_towers.transport import horovod as horovod_lib

logger = logging.getLogger("keras_towers")


class HorovodStrategy(ProcessStrategy):
    """Trains an existing Keras model in several processes, by Horovod.

    Every process is started with the same script, by ``keras-towers run -np 4
    script.py`` or by any launcher of Horovod. Each takes its part of every
    global batch, so that the weights are those that one process would have
    trained, float rounding apart, and they are bit-identical on every rank.
    Metrics and ``History`` are those of the global batch, on every rank.

    The source is tensorpack's ``HorovodTrainer``, and Horovod itself (Sergeev
    and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow", 2018).

    Args:
        average: True if the loss is a mean over the batch (Keras's habit).
            False sums the gradients of the towers.
        compression: how gradients travel: None: exactly, through shared
            memory where all ranks are on one machine without GPUs. ``"none"``:
            exactly, by Horovod. ``"fp16"``, ``"fp16-shards"``, ``"bf16"``,
            ``"fp16-feedback"``, ``"bf16-feedback"`` or a function: see
            ``keras_towers.reduction.compression``. Sparse gradients, metrics
            and statistics always travel exactly.
        sync_every_epoch: at each epoch's end, broadcast everything from rank 0
            once more, moving statistics averaged.
        batches: ``"split"``: every rank is given the same data, and takes its
            part of each batch. ``"each"``: every rank reads data of its own,
            whose batches together are the global batch; ranks may have
            different numbers of batches.
        towers: devices of this process: a number, GPU ids or device names. On
            a machine with GPUs the ranks share them out by their local rank.
        **options: ``mode``, ``updates`` and ``packer``, as for
            ``TowerStrategy``, for several towers in a process.

    Raises:
        TowerError: Horovod is not installed or was built for another
            TensorFlow; devices or options that do not exist.

    Example:
        >>> with keras_towers.HorovodStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    transport: horovod_lib.HorovodTransport

    def __init__(
        self,
        average: bool = True,
        compression: str | Exchange | None = None,
        sync_every_epoch: bool = True,
        batches: str = "split",
        towers: int | list[int | str] = 1,
        **options,
    ):
        transport = horovod_lib.HorovodTransport()
        _say_how_to_launch(transport)
        _share_cores(transport)
        exchange = compression_lib.resolve(compression)
        towers = _devices(transport, towers)
        if compression is None and _share_memory(transport, towers):
            exchange = SharedMemoryExchange()
        super().__init__(
            transport,
            exchange=exchange,
            towers=towers,
            average=average,
            sync_every_epoch=sync_every_epoch,
            batches=batches,
            **options,
        )

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs over MPI, not over Gloo."""
        return self.transport.mpi_enabled()


def _say_how_to_launch(transport: Transport) -> None:
    if transport.size == 1 and not horovod_lib.was_launched():
        logger.warning(
            "HorovodStrategy trains as one process, since no launcher started "
            "this one: `keras-towers run -np 2 script.py` starts two."
        )


def _devices(
    transport: Transport, towers: int | list[int | str]
) -> int | list[int | str]:
    """Of the machine's GPUs, those of this rank."""
    if not isinstance(towers, int):
        return towers
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return towers
    first = transport.local_rank * towers
    if first + towers > len(gpus):
        raise TowerError(
            f"rank {transport.rank} is number {transport.local_rank} of its "
            f"machine and wants {towers} GPU(s), but the machine has "
            f"{len(gpus)}: start at most {len(gpus) // towers} processes there."
        )
    mine = gpus[first : first + towers]
    # TensorFlow may have started; the other GPUs then stay visible, unused.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices(mine, "GPU")
    if tf.config.get_visible_devices("GPU") == mine:
        return list(range(towers))
    return list(range(first, first + towers))


def _share_memory(transport: Transport, towers: int | list[int | str]) -> bool:
    on_host = devices_lib.all_on_host(devices_lib.resolve(towers))
    return on_host and shared_memory.available(transport)


def _share_cores(transport: Transport) -> None:
    """Give every process of a machine its part of the cores."""
    if transport.local_size == 1 or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return
    cores = usable_cores()
    # Impossible once TensorFlow has started; the launcher sets it before.
    with contextlib.suppress(RuntimeError):
        if tf.config.threading.get_intra_op_parallelism_threads() == 0:
            tf.config.threading.set_intra_op_parallelism_threads(
                max(1, cores // transport.local_size)
            )
