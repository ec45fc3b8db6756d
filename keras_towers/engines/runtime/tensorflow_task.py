"""This process as a task of TensorFlow's runtime.

TensorFlow names its devices after the task, and fixes these names when it
starts: tensors and variables made before a process becomes a task cannot be
used afterwards. So that a model may be built anywhere, TensorFlow is configured
as the task when this package is imported. Its server starts together with
TensorFlow, when the first tensor is made.

TensorFlow's collectives wait forever for a rank that has stopped, or that died
while they did not communicate with it. So a thread polls other ranks, and
aborts the collectives of this process if one of them is lost. If there is a
store, it knows who has started, and tells all ranks who is gone: then each rank
polls only some of those with which it communicates.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
from collections.abc import Sequence

import tensorflow as tf

from keras_towers.foundation import compat, settings, system
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.message_lists import describe_each
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import (
    listening,
    liveness,
    separate_training,
    tf_config,
    watch,
)
from keras_towers.jobs.rendezvous.store import MissingRanks
from keras_towers.jobs.rendezvous.tf_config import Cluster

# The key of that all ranks have started.
_STARTED = "tasks-started"

_task: Task | None = None


class Task:
    """This process in a cluster.

    TensorFlow gets this object in place of a ``ServerDef``, and reads it when
    it starts. Only then the devices are known, and the port has to be free.
    """

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
        self._starting.enter_context(
            listening.reachable_only_at(self.cluster.address)
        )
        return self.definition()

    def definition(self) -> bytes:
        """Describe the server to TensorFlow."""
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
        """The index in the role."""
        return self.cluster.index


def prepare() -> None:
    """Configure TensorFlow as the task in ``TF_CONFIG``, if it can be ours.

    That is if several tasks train, and there are no parameter servers. Nothing
    is started, and errors are left to strategies to report.
    """
    # Processes that read data inherit the variable, but are no tasks.
    if multiprocessing.parent_process() is not None:
        return
    with contextlib.suppress(TowerError):
        cluster = tf_config.from_environment()
        if cluster and cluster.trains and cluster.size > 1 and not cluster.ps:
            _configure(cluster)


def start_task(cluster: Cluster) -> Task:
    """Start TensorFlow as a task, unless it has already started as such."""
    if _task is None or _task.cluster != cluster:
        _configure(cluster)
    if _task is None or _task.cluster != cluster:
        raise TowerError(
            f"TF_CONFIG says that this process is {cluster}, but TensorFlow "
            "started before it knew that, and everything created since would "
            "be lost. Set TF_CONFIG before the process starts, and import "
            "keras_towers before you create a tensor, variable or model."
        )
    compat.eager_context().ensure_initialized()
    return _task


def _configure(cluster: Cluster) -> None:
    """Configure TensorFlow as a task, unless it has started."""
    global _task
    listening.check_can_listen(cluster.address)
    # Whichever of its threads sends a message, or receives one.
    system.share_freed_memory()
    context, task = compat.eager_context(), Task(cluster)
    if compat.has_started() or compat.has_collective_leader():
        return
    # The configuration of TensorFlow's own strategy, in case it is used, too.
    context.configure_collective_ops(
        collective_leader=task.name_of(0),
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(f"/job:{task.cluster.role}/task:{task.cluster.index}",),
    )
    context.enable_collective_ops(task)
    _task = task


def wait_for_tasks(task: Task, timeout_s: float) -> None:
    """Wait until all ranks have started."""
    cluster, store = task.cluster, tf_config.store_of_tasks()
    silent, missing = _other_ranks(task), MissingRanks([], 0)
    for waited_s in liveness.wait_loop(timeout_s, settings.NETWORK_POLL_S):
        if store is None:
            silent = [rank for rank in silent if not _answers(task, rank)]
            some = silent[: settings.MAX_RANKS_NAMED]
            missing = MissingRanks(some, len(silent))
        else:
            hold_s = min(timeout_s, settings.HOLD_S)
            missing, _ = store.give(
                _STARTED, cluster.rank, cluster.size, None, hold_s
            )
        # Known only where they have met before.
        gone = watch.gone_ranks()
        if gone:
            raise TowerError(
                f"{describe_each(gone)}, but {task.cluster} makes a "
                "strategy, which connects all tasks of TF_CONFIG: make it in "
                "each of them, before any of them ends."
            )
        if not missing.number:
            return
        if waited_s:
            named = missing.named(_names(task, missing.some))
            logger.warning("%s waits for %s to start.", task.cluster, named)
    raise TowerError(
        f"{missing.named(_names(task, missing.some))} did not start within "
        f"{timeout_s:g} seconds. Every task that TF_CONFIG names must run "
        "the script, and must be reachable at its address; raise "
        "`start_timeout_s` to wait longer."
    )


def unreachable(task: Task) -> str:
    """Describe the polled ranks that do not answer; empty if all do."""
    silent = [rank for rank in _polled(task) if not _answers(task, rank)]
    return _describe(task, silent, liveness.TaskState.SUSPECTED)


def _polled(task: Task) -> list[int]:
    """The ranks that this one polls: all, or some next to it in a ring.

    In TensorFlow's rings, ranks are in the order of the names of their tasks.
    """
    others = _other_ranks(task)
    number = settings.MAX_RANKS_CHECKED
    if len(others) <= number:
        return others
    ring = sorted(range(task.cluster.size), key=task.name_of)
    here = ring.index(task.cluster.rank)
    sides = range(-(number // 2), number // 2 + 1)
    return sorted(ring[(here + side) % len(ring)] for side in sides if side)


def _other_ranks(task: Task) -> list[int]:
    return [r for r in range(task.cluster.size) if r != task.cluster.rank]


def _names(task: Task, ranks: Sequence[int]) -> list[str]:
    return [f"rank {rank} ({task.cluster.workers[rank]})" for rank in ranks]


def _describe(
    task: Task, ranks: Sequence[int], state: liveness.TaskState
) -> str:
    return describe_each(dict.fromkeys(_names(task, ranks), state))


def _answers(
    task: Task, rank: int, limit_s: float = settings.TASK_ANSWER_S
) -> bool:
    """Whether a rank runs, and has not been restarted."""
    try:
        compat.eager_context().check_collective_ops_peer_health(
            task.name_of(rank), int(limit_s * 1000)
        )
    except tf.errors.OpError:
        return False
    return True


_watch: watch.AnswerWatch | None = None


def join(cluster: Cluster, timeout_s: float, start_timeout_s: float) -> Task:
    """Start this process's task, wait for the other tasks, and watch them."""
    global _watch
    separate_training.refuse_child()
    task = start_task(cluster)
    wait_for_tasks(task, start_timeout_s)
    separate_training.take_place(cluster)
    if _watch is None:
        beat_s = min(timeout_s / 4, settings.BEAT_S)
        _watch = watch.AnswerWatch(
            _polled(task),
            lambda rank: _answers(task, rank, beat_s),
            timeout_s,
            lambda ranks: _abort(
                _describe(task, ranks, liveness.TaskState.LOST)
            ),
        )
        _watch.start()
        # TensorFlow must not be called while it is torn down.
        atexit.register(_watch.stop)
    _watch.liveness.limit_s = timeout_s
    return task


def _abort(why: str) -> None:
    """End the collectives of this process for good."""
    system.limit_teardown()
    compat.eager_context().abort_collective_ops(tf.errors.UNAVAILABLE, why)


def abort_call(why: str) -> None:
    """End the collectives of this process until ``renew_collectives``.

    Those of other ranks that wait for data of this one end, too, and their
    errors say why.
    """
    compat.eager_context().abort_collective_ops(tf.errors.ABORTED, why)


def renew_collectives(task: Task) -> None:
    """Make collectives possible again after ``abort_call``."""
    compat.enable_collectives_again(task.definition())
