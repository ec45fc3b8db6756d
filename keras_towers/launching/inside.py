"""``keras-towers run`` where a cluster has already decided what runs where."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from typing import NoReturn

from keras_towers.launching.job import Job
from keras_towers.meeting import environments
from keras_towers.meeting.environments import ClusterEnvironment, managers
from keras_towers.meeting.environments.tf_config import Cluster


def rank_to_be(processes: int | None) -> ClusterEnvironment | None:
    """The rank that this process is to be itself, None if it starts ranks."""
    # With another number of processes, each of a launcher starts a job of its
    # own.
    member = environments.detect()
    if member is None or member.placed or member.alone:
        return None
    return member if processes in (None, member.size) else None


def become(
    member: ClusterEnvironment | Cluster, job: Job, *, seeded: bool
) -> NoReturn:
    """Run a job's command instead of this program, as a rank."""
    # Without a seed of its options, by one that all know: of the job's name.
    seed = job.seed if seeded else None
    if seeded and seed is None:
        digest = hashlib.sha256(member.identity().encode()).digest()
        seed = int.from_bytes(digest[:4]) >> 1
    job = dataclasses.replace(job, seed=seed)
    environment = {**os.environ, **job.common_environment()}
    if job.interface:
        environment["HOROVOD_GLOO_IFACE"] = job.interface
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(job.command[0], job.command, environment)


def allocated(processes: int | None) -> dict[str, int] | None:
    """The hosts of a cluster's allocation, None where there is none."""
    # A number of processes in an allocation of one host is for that host,
    # however few tasks the manager was asked for.
    found = managers.allocation()
    if found is None or (processes and len(found[1]) == 1):
        return None
    manager, hosts = found
    if processes is None:
        print(
            f"keras-towers run: {sum(hosts.values())} processes on "
            f"{', '.join(hosts)}, as {manager} says",
            file=sys.stderr,
        )
    return hosts
