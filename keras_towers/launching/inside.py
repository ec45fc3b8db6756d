"""``keras-towers run`` where a cluster has already decided what runs where."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import NoReturn

from keras_towers.meeting import environments
from keras_towers.meeting.environments import ClusterEnvironment
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.meeting.variables import process_environment


def rank_to_be(processes: int | None) -> ClusterEnvironment | None:
    """The rank that this process is to be itself, None if it starts ranks.

    Args:
        processes: how many the user asks for; None: as many as there are. With
            another number each process of a launcher starts a job of its own.
    """
    member = environments.detect()
    if member is None or member.placed or member.alone:
        return None
    return member if processes in (None, member.size) else None


def become(
    member: ClusterEnvironment | Cluster,
    command: list[str],
    *,
    seed: int | None,
    seeded: bool,
    interface: str | None,
    stall_warning_s: int,
    stall_shutdown_s: int,
) -> NoReturn:
    """Run a command instead of this program, as a rank.

    Args:
        seed: the random seed of all ranks; None: one that is the job's.
        interface: the network interface of the rendezvous; None: detected.
    """
    if not seeded:
        seed = None
    elif seed is None:
        # The ranks have not met yet, but all know the job's name.
        digest = hashlib.sha256(member.identity().encode()).digest()
        seed = int.from_bytes(digest[:4]) >> 1
    environment = {
        **os.environ,
        **process_environment(seed, stall_warning_s, stall_shutdown_s),
    }
    if interface:
        environment["HOROVOD_GLOO_IFACE"] = interface
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def allocated(
    processes: int | None,
) -> tuple[int | None, dict[str, int] | None]:
    """The number of ranks to start, and hosts, as far as a cluster says it.

    Args:
        processes: how many the user asks for; None: as many as fit.

    Returns:
        The number and the hosts, None where nothing names any.
    """
    # A number of processes in an allocation of one host is for that host,
    # however few tasks the manager was asked for.
    found = environments.allocation()
    if found is None or (processes and len(found[1]) == 1):
        return processes, None
    manager, hosts = found
    if processes is None:
        processes = sum(hosts.values())
        print(
            f"keras-towers run: {processes} processes on "
            f"{', '.join(hosts)}, as {manager} says",
            file=sys.stderr,
        )
    return processes, hosts
