"""This process as a task of TensorFlow's runtime.

TensorFlow names its devices after the task, and fixes the names when it starts:
what was made before a process became a task cannot be used any more. So that a
model may be built anywhere, TensorFlow is told of the task when this package is
imported. It listens for the others as soon as it starts itself: with the first
tensor.
"""

from __future__ import annotations

import contextlib
import multiprocessing

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.meeting import listening
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.environments.tf_config import Cluster

_told: Task | None = None


class Task:
    """This process in a cluster."""

    # It stands for the ``ServerDef`` that TensorFlow asks for when it starts:
    # only then the devices are known, and whether the port is free.

    def __init__(self, cluster: Cluster):
        self.cluster: Cluster = cluster
        self._starting = contextlib.ExitStack()

    @property
    def host(self) -> str:
        """The device of this process that sends and receives."""
        return f"{self.name_of(self.cluster.rank)}/device:CPU:0"

    def name_of(self, rank: int) -> str:
        """TensorFlow's name of a rank."""
        role, index = self.cluster.tasks[rank]
        return f"/job:{role}/replica:0/task:{index}"

    def SerializeToString(self) -> bytes:
        """Describe the server that TensorFlow is about to start."""
        self._starting.enter_context(listening.only_at(self.cluster.address))
        training = {
            role: list(self.cluster.jobs[role])
            for role in dict.fromkeys(role for role, _ in self.cluster.tasks)
        }
        return tf.train.ServerDef(
            cluster=tf.train.ClusterSpec(training).as_cluster_def(),
            job_name=self.cluster.role,
            task_index=self.cluster.index,
            default_session_config=compat.eager_context().config,
            protocol="grpc",
        ).SerializeToString()

    @property
    def job_name(self) -> str:
        """The role; TensorFlow asks for it when the server has started."""
        self._starting.close()
        return self.cluster.role

    @property
    def task_index(self) -> int:
        """The index."""
        return self.cluster.index


def prepare() -> None:
    """Tell TensorFlow of the task in ``TF_CONFIG``, if it is one for us."""
    # It is where there are several tasks that train, and no parameter servers.
    # Nothing starts, and nothing is said of what is wrong: strategies do that.
    # Processes that read data inherit the variable.
    if multiprocessing.parent_process() is not None:
        return
    with contextlib.suppress(TowerError):
        cluster = tf_config.from_environment()
        if cluster and cluster.trains and cluster.size > 1 and not cluster.ps:
            listening.check(cluster.address)
            _tell(Task(cluster))


def start(cluster: Cluster) -> Task:
    """Start TensorFlow as a task, unless it has been started as this one."""
    if _told is None or _told.cluster != cluster:
        listening.check(cluster.address)
        _tell(Task(cluster))
    if _told is None or _told.cluster != cluster:
        raise TowerError(
            f"this process is {cluster} by TF_CONFIG, but TensorFlow has "
            "started without knowing that, and what was made since would be "
            "lost. Set TF_CONFIG before, and import keras_towers before the "
            "first tensor, variable or model is made."
        )
    compat.eager_context().ensure_initialized()
    return _told


def _tell(task: Task) -> None:
    """Tell TensorFlow of the task, if it has not started."""
    global _told
    context = compat.eager_context()
    if compat.has_started() or compat.has_collective_leader():
        return
    # The same as TensorFlow's own strategy asks for, which may come later.
    context.configure_collective_ops(
        collective_leader=task.name_of(0),
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(f"/job:{task.cluster.role}/task:{task.cluster.index}",),
    )
    context.enable_collective_ops(task)
    _told = task
