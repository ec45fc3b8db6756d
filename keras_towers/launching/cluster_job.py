"""A job with parameter servers, on TensorFlow's runtime on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from keras_towers.launching import outcome
from keras_towers.launching.job import Job, RunningJob
from keras_towers.launching.rank_process import RankStart
from keras_towers.launching.supervision import Supervisor
from keras_towers.rendezvous import tf_config
from keras_towers.rendezvous.network import LOOPBACK, reserve_port
from keras_towers.rendezvous.tf_config import Cluster

_ON_SERVERS = ("sync-replicas", "SyncReplicasStrategy")


def run_cluster(job: Job, tasks: Mapping[str, int]) -> outcome.Outcome:
    """Run a job with parameter servers on this machine, until it ends.

    It ends when all tasks have, except the parameter servers (role ``"ps"``),
    which end by themselves when they notice it.

    Args:
        job: the options of the job.
        tasks: the number of tasks of each role.
    """
    with local_cluster(tasks) as clusters, RunningJob(job, ()) as run:
        return run.run_rounds(lambda: run_tasks(run, clusters))


def run_tasks(run: RunningJob, clusters: list[Cluster]) -> outcome.Outcome:
    """Run all tasks of a cluster until they end.

    Args:
        run: the job.
        clusters: the cluster as each task sees it.
    """
    run.begin_round(())
    common = {
        **run.environment(),
        # This process may be a rank of another job.
        "HOROVOD_RANK": "",
    }
    # Workers need all of a GPU's memory.
    without_gpus = {"CUDA_VISIBLE_DEVICES": "-1"}
    run.start(
        [
            RankStart(
                f"{cluster.role} {cluster.index}",
                cluster.number,
                {
                    **common,
                    tf_config.VARIABLE: cluster.to_json(),
                    **(without_gpus if cluster.role == "ps" else {}),
                },
                local_size=len(clusters),
                serves=cluster.role == "ps",
            )
            for cluster in clusters
        ]
    )
    return Supervisor(run, kind="task").wait(
        run.job.how_to_connect(*_ON_SERVERS)
    )


@contextlib.contextmanager
def local_cluster(tasks: Mapping[str, int]) -> Iterator[list[Cluster]]:
    """Reserve free ports of this machine for the tasks of a cluster.

    Inside the block TensorFlow's servers can listen on the ports, also after a
    restart, and no other process is given them.
    """
    with contextlib.ExitStack() as ports:
        jobs = {
            role: tuple(reserve_port(LOOPBACK, ports) for _ in range(count))
            for role, count in tasks.items()
            if count
        }
        yield [
            Cluster(jobs, role, index)
            for role, addresses in jobs.items()
            for index in range(len(addresses))
        ]
