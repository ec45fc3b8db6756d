"""Managers of clusters, by the hosts that they have given to a job."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from keras_towers.errors import TowerError
from keras_towers.meeting.hosts import parse_hostfile

_Variables = Mapping[str, str]
# A shell that salloc opened is a step too, with this number.
_INTERACTIVE_STEP = "4294967290"


def allocation(
    variables: _Variables = os.environ,
) -> tuple[str, dict[str, int]] | None:
    """The manager of this job's hosts, and the number of processes on each."""
    for manager, hosts_of in _MANAGERS.items():
        hosts = hosts_of(variables)
        if hosts:
            return manager, hosts
    return None


def _slurm(variables: _Variables) -> dict[str, int]:
    step = variables.get("SLURM_STEP_ID", _INTERACTIVE_STEP)
    # Of several steps of a job, such as those of a search, each has its
    # part.
    nodes, tasks = (
        ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
        if step == _INTERACTIVE_STEP
        else ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    )
    names = expand_nodes(variables.get(nodes, ""))
    counts = [
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", variables.get(tasks, "")
        )
        for _ in range(int(times or 1))
    ]
    if len(names) != len(counts):
        counts = [1] * len(names)
    # This machine's own resolver may not know Slurm's name of it.
    here = variables.get("SLURMD_NODENAME")
    names = ["localhost" if name == here else name for name in names]
    return dict(zip(names, counts, strict=True))


def _pbs(variables: _Variables) -> dict[str, int]:
    return _counted(variables.get("PBS_NODEFILE"))


def _lsf(variables: _Variables) -> dict[str, int]:
    found = _counted(variables.get("LSB_DJOB_HOSTFILE"))
    words = variables.get("LSB_MCPU_HOSTS", "").split()
    return found or dict(zip(words[::2], map(int, words[1::2]), strict=False))


def _mpi_operator(variables: _Variables) -> dict[str, int]:
    """Hosts of an MPIJob, in the launcher's pod."""
    names = "OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE"
    told = [variables[name] for name in names if name in variables]
    file = Path(told[0] if told else "/etc/mpi/hostfile")
    return parse_hostfile(file) if file.is_file() else {}


_MANAGERS: dict[str, Callable[[_Variables], dict[str, int]]] = {
    "Slurm": _slurm,
    "PBS": _pbs,
    "LSF": _lsf,
    "the MPI Operator": _mpi_operator,
}


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


def expand_nodes(text: str) -> list[str]:
    """The names in Slurm's host list."""
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
        for index in range(int(first), int(last or first) + 1):
            digits = str(index).zfill(len(first))
            names += [f"{before}{digits}{tail}" for tail in _expand(after)]
    return names
