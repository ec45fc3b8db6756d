"""One process per task of ``TF_CONFIG``, connected by TensorFlow itself."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers.devices import Towers
from keras_towers.errors import TowerError
from keras_towers.fit.contract import Batches, Extent, Updates
from keras_towers.meeting import store
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.reduction import Exchange, GradientPacker
from keras_towers.reduction.compression import CompressionName
from keras_towers.strategies.modes import ModeName
from keras_towers.strategies.processes import devices_of_rank, share_cores
from keras_towers.strategies.ranks import RankStrategy
from keras_towers.transport import SingleProcess, Transport, joining
from keras_towers.transport.collectives import CollectiveTransport

logger: logging.Logger = logging.getLogger("keras_towers")


class MultiWorkerTowerStrategy(RankStrategy):
    """Trains an existing Keras model on several machines, over TensorFlow.

    Needs nothing but TensorFlow: all tasks that ``TF_CONFIG`` names run the
    same script, and exchange tensors by TensorFlow's own collective operations
    and gRPC servers. Each takes its share of every global batch. The weights
    are those that one process would have trained, up to float rounding, and
    bit-identical on every rank. Metrics and ``History`` are those of the
    global batch, on every rank.

    The chief, or else the first worker, is rank 0. TensorFlow starts as one of
    the tasks if ``keras_towers`` is imported before the first tensor or model;
    those can then be made anywhere. Its server is not authenticated, and
    belongs in a private network.

    Does in ``fit`` what ``tf.distribute.MultiWorkerMirroredStrategy`` did in
    that of Keras 2.

    With ``compression=None`` gradients are exchanged through shared memory if
    all tasks are on one machine without GPUs, else by TensorFlow: a ring, or
    NCCL where towers are GPUs.

    Raises:
        TowerError: ``TF_CONFIG`` is missing or malformed, or this process does
            not train; its port is in use; TensorFlow has started before it was
            imported; the other tasks do not start, or have other versions; or
            devices or options that do not exist.

    Example:
        >>> with keras_towers.MultiWorkerTowerStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        average: bool = True,
        compression: CompressionName | Exchange | None = None,
        sync_every_epoch: bool = True,
        batches: Batches = "split",
        towers: Towers = 1,
        *,
        timeout: float = 30,
        start_timeout: float = 600,
        exact: bool = False,
        batch_norm: Extent | None = None,
        random: Extent | None = None,
        mode: ModeName | None = None,
        updates: Updates | None = None,
        packer: GradientPacker | bool | None = None,
    ):
        """Connect this task with the others.

        Args:
            average: as for ``HorovodStrategy``.
            compression: likewise.
            sync_every_epoch: likewise.
            batches: likewise.
            towers: likewise; a machine's GPUs are assigned to its tasks in
                turn.
            timeout: seconds that a task may give no sign of life, until all
                others get a ``tf.errors.UnavailableError``. Then start all
                tasks again: ``keras.callbacks.BackupAndRestore`` and
                ``kt.Backup`` go on where training was.
            start_timeout: seconds to wait for the others to start.
            exact: as for ``TowerStrategy``.
            batch_norm: likewise.
            random: likewise.
            mode: likewise, for several towers in a process.
            updates: likewise.
            packer: likewise.
        """
        for name, value in {
            "timeout": timeout,
            "start_timeout": start_timeout,
        }.items():
            if not value > 0:
                raise TowerError(f"{name}={value}: give a number of seconds.")
        self._timeout_s, self._start_timeout_s = timeout, start_timeout
        super().__init__(
            average,
            compression,
            sync_every_epoch,
            batches,
            towers,
            exact=exact,
            batch_norm=batch_norm,
            random=random,
            mode=mode,
            updates=updates,
            packer=packer,
        )

    def _connect(self, towers: Towers) -> tuple[Transport, Towers]:
        cluster = tf_config.required()
        if not cluster.trains:
            raise TowerError(
                f"TF_CONFIG says that this process is {cluster}, and "
                "MultiWorkerTowerStrategy is for those that train: the chief "
                "and the workers. An evaluator evaluates checkpoints on its "
                "own, without a strategy."
            )
        share_cores(cluster)
        towers = devices_of_rank(cluster, towers)
        transport = _connected(
            cluster, towers, self._timeout_s, self._start_timeout_s
        )
        return transport, towers

    def __exit__(self, *error: Any) -> None:
        transport = self._config.transport
        unavailable = isinstance(error[1], tf.errors.UnavailableError)
        if unavailable and isinstance(transport, CollectiveTransport):
            lost = transport.lost()
            if lost:
                error[1].add_note(
                    f"keras_towers: {lost} does not answer. Start all tasks "
                    "again: with keras.callbacks.BackupAndRestore or kt.Backup "
                    "they go on where training was."
                )
        super().__exit__(*error)


def _connected(
    cluster: Cluster,
    towers: Towers,
    timeout_s: float,
    start_timeout_s: float,
) -> Transport:
    if cluster.size == 1:
        logger.warning(
            "MultiWorkerTowerStrategy trains in a single process, because "
            "TF_CONFIG names no other task that trains."
        )
        return SingleProcess()
    store.tell_connected(cluster.number)
    task = joining.join(cluster, timeout_s, start_timeout_s)
    first = devices_lib.resolve(towers)[0]
    on_host = devices_lib.all_on_host([first])
    transport = CollectiveTransport(task, None if on_host else first)
    joining.check_versions_once(transport)
    return transport
