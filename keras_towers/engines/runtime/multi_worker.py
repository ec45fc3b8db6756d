"""The strategy of tasks of ``TF_CONFIG`` that all train."""

from __future__ import annotations

from typing import Any, Unpack

import tensorflow as tf

from keras_towers.engines.runtime import tensorflow_task
from keras_towers.engines.runtime.collective_transport import (
    CollectiveTransport,
)
from keras_towers.fit.given_values import check_seconds
from keras_towers.fit.options import RankKeywords, options_of
from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import store, tf_config
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.device_mesh import ClaimedDevices
from keras_towers.transport import (
    SingleProcess,
    Transport,
    devices as devices_lib,
)


class MultiWorkerTowerStrategy(BaseStrategy):
    """Trains a model on several machines, over TensorFlow.

    This strategy needs only TensorFlow. All tasks in ``TF_CONFIG`` run the same
    script, and exchange tensors with TensorFlow's own collective operations and
    gRPC servers. Each takes its share of every global batch. Results equal
    those of one process, as with ``HorovodStrategy``.

    The chief, or else the first worker, is rank 0. Import ``keras_towers``
    before you make the first tensor or model, so that TensorFlow starts as one
    of the tasks. TensorFlow's server authenticates no client: use a private
    network.

    Replaces ``tf.distribute.MultiWorkerMirroredStrategy``, which worked with
    ``fit`` of Keras 2.

    With ``compression=None``, tasks exchange gradients through shared memory if
    all are on one machine without GPUs. Otherwise TensorFlow exchanges them in
    a ring, or over NCCL if towers are GPUs.

    Args:
        towers: as for ``HorovodStrategy``; a machine's GPUs are assigned to its
            tasks in turn.
        heartbeat_timeout_s: if a task gives no sign of life for this many
            seconds, all other tasks get a ``tf.errors.UnavailableError``. Then
            start all tasks again: with ``kt.Backup`` or
            ``keras.callbacks.BackupAndRestore``, training resumes from the last
            backup.
        start_timeout_s: seconds to wait for the other tasks to start.
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
        TowerError: ``TF_CONFIG`` is missing or malformed, or this process does
            not train; its port is in use; TensorFlow has started before
            ``keras_towers`` was imported; the other tasks do not start, or have
            other versions; or a device or option does not exist.

    Example:
        >>> with keras_towers.MultiWorkerTowerStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        towers: devices_lib.Towers = 1,
        *,
        heartbeat_timeout_s: float = settings.LOST_S,
        start_timeout_s: float = settings.RENDEZVOUS_TIMEOUT_S,
        **options: Unpack[RankKeywords],
    ):
        checked = options_of(self, RankKeywords, options)
        check_seconds("heartbeat_timeout_s", heartbeat_timeout_s)
        check_seconds("start_timeout_s", start_timeout_s)
        cluster = tf_config.required()
        if not cluster.trains:
            advice = tf_config.EVALUATOR
            if cluster.role == "ps":
                advice = (
                    'It needs no parameter servers: leave "ps" out of '
                    "TF_CONFIG, or use DistributedReplicatedStrategy in all "
                    "tasks."
                )
            raise TowerError(
                "MultiWorkerTowerStrategy is for tasks that train (the chief "
                "and the workers), but TF_CONFIG says that this process is "
                f"{cluster}. {advice}"
            )
        claimed = ClaimedDevices(cluster, towers, checked.layouts)
        transport = _connect(
            cluster, claimed, heartbeat_timeout_s, start_timeout_s
        )
        super().__init__(claimed.towers(), checked, transport=transport)
        self._compose()

    @property
    def cluster_resolver(self) -> object:
        """The tasks of ``TF_CONFIG``, and which of them this process is."""
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()

    def __exit__(self, *error: Any) -> None:
        transport = self._config.transport
        unavailable = isinstance(error[1], tf.errors.UnavailableError)
        if unavailable and isinstance(transport, CollectiveTransport):
            silent = tensorflow_task.unreachable(transport.task)
            if silent:
                error[1].add_note(
                    f"keras_towers: {silent}. Start all tasks again: with "
                    "keras.callbacks.BackupAndRestore or kt.Backup they resume "
                    "from the last backup."
                )
        super().__exit__(*error)


def _connect(
    cluster: Cluster,
    claimed: ClaimedDevices,
    timeout_s: float,
    start_timeout_s: float,
) -> Transport:
    """Join the job, once all tasks have started."""
    if cluster.size == 1:
        logger.warning(
            "MultiWorkerTowerStrategy trains in a single process, because "
            "TF_CONFIG names no other task that trains."
        )
        return SingleProcess()
    store.report_connected(cluster.rank)
    task = tensorflow_task.join(cluster, timeout_s, start_timeout_s)
    transport = CollectiveTransport(task)
    transport.compare_once()
    transport.try_nccl(claimed.first_gpu)
    return transport
