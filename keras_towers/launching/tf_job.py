"""A job on TensorFlow's runtime, on this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
from collections.abc import Mapping

from keras_towers.launching.job import Job, signals_to
from keras_towers.launching.ranks import Console, Place, Rank
from keras_towers.launching.supervision import (
    Connected,
    Event,
    Outcome,
    end_all,
    supervise,
)
from keras_towers.launching.tf_cluster import (
    local_cluster,
    task_environment,
    told_of_joining,
)
from keras_towers.meeting.addresses import LOOPBACK
from keras_towers.meeting.variables import process_environment
from keras_towers.noticeboard import FOLDER

_SERVED = "sync-replicas, or use kt.SyncReplicasStrategy()"
_COLLECTIVE = "multi-worker, or use kt.MultiWorkerTowerStrategy()"


def run_cluster(job: Job, tasks: Mapping[str, int]) -> Outcome:
    """Run a job on TensorFlow's runtime on this machine, until it ends.

    It ends when all tasks but those of the role ``"ps"`` have; these notice it
    themselves.

    Args:
        job: its ``ranks`` and ``hosts`` do not matter.
        tasks: the number of tasks of each role.

    Raises:
        TowerError: it cannot be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ranks: list[Rank] = []
    with contextlib.ExitStack() as undo:
        console = Console(job.output, events.put, job.launcher)
        undo.callback(console.close)
        clusters = undo.enter_context(local_cluster(tasks))
        joins = undo.enter_context(
            told_of_joining(lambda index: events.put(Connected(index)))
        )
        board = undo.enter_context(tempfile.TemporaryDirectory())
        undo.callback(end_all, ranks)
        undo.enter_context(signals_to(events))

        for index, cluster in enumerate(clusters):
            place = Place(
                name=f"{cluster.role} {cluster.index}",
                index=index,
                host=None,
                local_size=len(clusters),
                rendezvous=LOOPBACK,
                serves=cluster.role == "ps",
            )
            if job.verbose:
                console.say(str(cluster))
            own = {
                **process_environment(job.seed),
                **task_environment(cluster),
                **joins(index),
                FOLDER: board,
                "HOROVOD_STALL_CHECK_TIME_SECONDS": str(job.stall_warning_s),
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(
                    job.stall_shutdown_s
                ),
                "HOROVOD_STALL_CHECK_DISABLE": str(
                    int(job.stall_warning_s == 0)
                ),
            }
            if place.serves:
                # Workers need all of a GPU's memory.
                own["CUDA_VISIBLE_DEVICES"] = "-1"
                # TensorFlow's server prints its configuration otherwise.
                own["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get(
                    "TF_CPP_MIN_LOG_LEVEL", "1"
                )
            ranks.append(
                Rank(place, job.command, own, console, None, events.put)
            )
        return supervise(
            ranks,
            events,
            console,
            job.grace_s,
            what="task",
            how_to_connect=_SERVED if "ps" in tasks else _COLLECTIVE,
        )
