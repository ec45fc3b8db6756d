"""The hosts that a cluster's manager has given to this job."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_towers.errors import TowerError
from keras_towers.launching.hosts import parse_hostfile

# A shell that salloc opened is a step too, with this number.
_INTERACTIVE_STEP = "4294967290"
_MPI_JOB_HOSTS = "/etc/mpi/hostfile"


@dataclass(frozen=True)
class Allocation:
    """Hosts on which a job may start processes.

    Attributes:
        manager: who gave them, for messages.
        hosts: how many processes each is to run.
    """

    manager: str
    hosts: dict[str, int]


def allocation(
    environment: Mapping[str, str] = os.environ,
) -> Allocation | None:
    """The hosts of this job, None if nothing says which.

    Args:
        environment: the variables of a process in the job, on one of its hosts
            or on one that can reach them.

    Raises:
        TowerError: a list of hosts cannot be read.
    """
    for manager, find in (
        ("Slurm", _slurm),
        ("PBS", _pbs),
        ("LSF", _lsf),
        ("the MPI Operator", _mpi_job),
    ):
        hosts = find(environment)
        if hosts:
            return Allocation(manager, hosts)
    return None


def expand_nodes(text: str) -> list[str]:
    """The names in Slurm's short form of them.

    Example:
        >>> expand_nodes("gpu1,node[01-03,07]")
        ['gpu1', 'node01', 'node02', 'node03', 'node07']
    """
    return [
        name
        for part in re.findall(r"(?:\[[^]]*\]|[^][,])+", text)
        for name in _expand(part)
    ]


def _expand(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    names = []
    for span in inside.split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            digits = str(number).zfill(len(first))
            names += [f"{before}{digits}{tail}" for tail in _expand(after)]
    return names


def _slurm(environment: Mapping[str, str]) -> dict[str, int]:
    step = environment.get("SLURM_STEP_ID", _INTERACTIVE_STEP)
    # Of several steps of a job, such as those of a search, each has its part.
    nodes, tasks = (
        ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
        if step == _INTERACTIVE_STEP
        else ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    )
    names = expand_nodes(environment.get(nodes, ""))
    counts = [
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get(tasks, "")
        )
        for _ in range(int(times or 1))
    ]
    if len(names) != len(counts):
        counts = [1] * len(names)
    # What Slurm calls this machine, its own resolver may not know.
    here = environment.get("SLURMD_NODENAME")
    names = ["localhost" if name == here else name for name in names]
    return dict(zip(names, counts, strict=True))


def _pbs(environment: Mapping[str, str]) -> dict[str, int]:
    return _counted(environment.get("PBS_NODEFILE"))


def _lsf(environment: Mapping[str, str]) -> dict[str, int]:
    found = _counted(environment.get("LSB_DJOB_HOSTFILE"))
    words = environment.get("LSB_MCPU_HOSTS", "").split()
    return found or dict(zip(words[::2], map(int, words[1::2]), strict=False))


def _mpi_job(environment: Mapping[str, str]) -> dict[str, int]:
    names = "OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE"
    told = [environment[name] for name in names if name in environment]
    file = Path(told[0] if told else _MPI_JOB_HOSTS)
    return parse_hostfile(file) if file.is_file() else {}


def _counted(file: str | None) -> dict[str, int]:
    """Hosts of a file with a line for each process."""
    if not file:
        return {}
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise TowerError(
            f"cannot read the list of this job's hosts: {error}"
        ) from None
    return dict(collections.Counter(lines))
