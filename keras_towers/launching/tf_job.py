"""A job on TensorFlow's runtime, on this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping

from keras_towers.launching.job import Job, Running
from keras_towers.launching.ranks import Rank
from keras_towers.launching.supervision import Outcome, supervise
from keras_towers.meeting import store
from keras_towers.meeting.addresses import LOOPBACK
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.settings import SECRET, STORE

_SERVED = "sync-replicas, or use kt.SyncReplicasStrategy()"
_COLLECTIVE = "multi-worker, or use kt.MultiWorkerTowerStrategy()"


def run_cluster(job: Job, tasks: Mapping[str, int]) -> Outcome:
    """Run a job on TensorFlow's runtime on this machine, until it ends."""
    # It ends when all tasks but those of the role ``"ps"`` have; these notice
    # it themselves.
    with local_cluster(tasks) as clusters, Running(job, ()) as run:
        everyone = {
            **job.common_environment(),
            STORE: f"{run.address}:{run.server.endpoint.port}",
            SECRET: run.server.endpoint.secret,
            # This process may be a rank of another job.
            store.HOROVODS_ADDRESS: "",
            "HOROVOD_RANK": "",
        }
        for cluster in clusters:
            serves = cluster.role == "ps"
            if job.verbose:
                run.console.say(str(cluster))
            own = {**everyone, tf_config.VARIABLE: cluster.written()}
            if serves:
                # Workers need all of a GPU's memory.
                own["CUDA_VISIBLE_DEVICES"] = "-1"
            Rank(
                run,
                f"{cluster.role} {cluster.index}",
                cluster.number,
                own,
                local_size=len(clusters),
                serves=serves,
            )
        return supervise(
            run,
            what="task",
            how_to_connect=_SERVED if "ps" in tasks else _COLLECTIVE,
        )


@contextlib.contextmanager
def local_cluster(tasks: Mapping[str, int]) -> Iterator[list[Cluster]]:
    """Give the tasks of a cluster free ports of this machine."""
    # The ports are reserved inside the block: TensorFlow's servers can listen
    # on them, also after a restart, and nobody else is given them.
    with contextlib.ExitStack() as held:
        jobs = {
            role: tuple(
                f"{LOOPBACK}:{held.enter_context(_reserved())}"
                for _ in range(count)
            )
            for role, count in tasks.items()
            if count
        }
        yield [
            Cluster(jobs, role, index)
            for role, addresses in jobs.items()
            for index in range(len(addresses))
        ]


@contextlib.contextmanager
def _reserved() -> Iterator[int]:
    with socket.socket() as holder:
        # TensorFlow sets the same option: with it on both sides, one may
        # listen where the other only holds the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]
