"""The other ranks of TensorFlow's runtime: waiting for them, losing them.

TensorFlow's collectives wait for ever for a rank that has stopped, and for one
that has died unless they were just talking to it. So a thread asks all others
for a sign of life, and ends the collectives of this process if one gives none.
"""

from __future__ import annotations

import atexit
import logging

import tensorflow as tf

from keras_towers import compat, settings, system
from keras_towers.errors import TowerError
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.meeting.liveness import AnswerWatch, waiting
from keras_towers.meeting.watch import SILENT
from keras_towers.transport import runtime
from keras_towers.transport.runtime import Task

logger: logging.Logger = logging.getLogger("keras_towers")


def wait_for(task: Task, timeout_s: float) -> None:
    """Wait until all ranks have started."""
    missing = _others(task)
    for waited_s in waiting(timeout_s, settings.NETWORK_POLL_S):
        missing = [rank for rank in missing if not _answers(task, rank)]
        if not missing:
            return
        if waited_s:
            named = _named(task, missing)
            logger.warning("%s waits for %s to start.", task.cluster, named)
    raise TowerError(
        f"{_named(task, missing)} did not start within {timeout_s:g} seconds. "
        "Every task that TF_CONFIG names has to run the script, and to be "
        "reached at its address; `start_timeout_s` waits for longer."
    )


def lost(task: Task) -> str:
    """The ranks that do not answer, in words; empty if all do."""
    silent = [rank for rank in _others(task) if not _answers(task, rank)]
    return _named(task, silent)


def _others(task: Task) -> list[int]:
    return [r for r in range(task.cluster.size) if r != task.cluster.rank]


def _named(task: Task, ranks: list[int]) -> str:
    return ", ".join(
        f"rank {rank} ({task.cluster.workers[rank]})" for rank in ranks
    )


def _answers(
    task: Task, rank: int, limit_s: float = settings.TASK_ANSWER_S
) -> bool:
    """Whether a rank runs, and is the same process as before."""
    try:
        compat.eager_context().check_collective_ops_peer_health(
            task.name_of(rank), int(limit_s * 1000)
        )
    except tf.errors.OpError:
        return False
    return True


_watch: AnswerWatch | None = None


def join(cluster: Cluster, timeout_s: float, start_timeout_s: float) -> Task:
    """Start this process's task, wait for the others, and watch them."""
    global _watch
    task = runtime.start(cluster)
    wait_for(task, start_timeout_s)
    if _watch is None:
        beat_s = min(timeout_s / 4, settings.BEAT_S)
        _watch = AnswerWatch(
            _others(task),
            lambda rank: _answers(task, rank, beat_s),
            timeout_s,
            lambda lost: _abort(_named(task, lost)),
        )
        _watch.start()
        # TensorFlow must not be asked while Python takes it down.
        atexit.register(_watch.stop)
    _watch.limit_s = timeout_s
    return task


def _abort(lost: str) -> None:
    """End the collectives of this process."""
    system.end_in_time()
    compat.eager_context().abort_collective_ops(
        tf.errors.UNAVAILABLE, f"{lost} {SILENT}"
    )
