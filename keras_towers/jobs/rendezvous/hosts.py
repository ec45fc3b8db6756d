"""The hosts of a job, named or allocated, and the placement of its ranks.

``cli/run.py`` parses and allocates hosts; ``jobs/launching/rank_job.py`` places
ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from keras_towers.foundation.errors import TowerError

_Variables = Mapping[str, str]
# The number of the step that is the shell opened by salloc.
_INTERACTIVE_STEP = "4294967290"
_HOST = re.compile(r"([\w.-]+)(?:(?::|\s+slots\s*=\s*)(\d+))?")


def parse_hosts(text: str) -> dict[str, int]:
    """Parse ``host:slots,host:slots``; slots default to 1."""
    return read_entries(text.split(","), "-H takes host:slots,host:slots,...")


def parse_hostfile(path: Path) -> dict[str, int]:
    """Parse lines like ``host slots=2`` or ``host:2``; # starts a comment."""
    text = _read(path, f"the hostfile {path}")
    lines = [line.split("#")[0] for line in text.splitlines()]
    return read_entries(
        filter(str.strip, lines),
        f"the hostfile {path} takes lines like 'host slots=2'",
    )


def read_entries(entries: Iterable[str], form: str) -> dict[str, int]:
    """Read a host and its slots from each entry; slots default to 1."""
    hosts: dict[str, int] = {}
    for entry in map(str.strip, entries):
        match = _HOST.fullmatch(entry)
        if not match:
            raise TowerError(f"{form}, not '{entry}'")
        name, count = match[1], int(match[2] or 1)
        if name in hosts:
            raise TowerError(f"the host {name} is given twice")
        if count < 1:
            raise TowerError(f"the host {name} needs at least one slot")
        hosts[name] = count
    if not hosts:
        raise TowerError(f"{form}; no host was given")
    return hosts


def allocation(
    variables: _Variables = os.environ,
) -> tuple[str, dict[str, int]] | None:
    """Return the cluster manager, and its number of processes on each host."""
    for manager, hosts_of in _MANAGERS.items():
        hosts = hosts_of(variables)
        if hosts:
            return manager, hosts
    return None


def _slurm(variables: _Variables) -> dict[str, int]:
    step = variables.get("SLURM_STEP_ID", _INTERACTIVE_STEP)
    # A job may run several steps, as for a search, each on some of its nodes.
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
    # This machine may not be able to resolve the name that Slurm gave it.
    this_node = variables.get("SLURMD_NODENAME")
    names = ["localhost" if name == this_node else name for name in names]
    return dict(zip(names, counts, strict=True))


def _mpi_operator(variables: _Variables) -> dict[str, int]:
    """Return the hosts of an MPIJob, as its launcher's pod sees them."""
    names = "OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE"
    files = [variables[name] for name in names if name in variables]
    file = Path(files[0] if files else "/etc/mpi/hostfile")
    return parse_hostfile(file) if file.is_file() else {}


def _one_line_per_process(name: str, variables: _Variables) -> dict[str, int]:
    """Read a file with one host per process, which a variable names."""
    file = variables.get(name)
    if not file:
        return {}
    lines = _read(Path(file), "the list of this job's hosts").split()
    return dict(collections.Counter(lines))


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TowerError(f"cannot read {what}: {error}") from None


_MANAGERS: dict[str, Callable[[_Variables], dict[str, int]]] = {
    "Slurm": _slurm,
    "PBS": functools.partial(_one_line_per_process, "PBS_NODEFILE"),
    "LSF": functools.partial(_one_line_per_process, "LSB_DJOB_HOSTFILE"),
    "the MPI Operator": _mpi_operator,
}


def expand_nodes(text: str) -> list[str]:
    """Return the names in a Slurm host list: ``gpu1,r[1-2]n[09-10]``."""
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


@dataclasses.dataclass(frozen=True)
class RankPlacement:
    """The placement of a rank, with Horovod's field names in their order."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the rank."""
        fields = dataclasses.asdict(self)
        return {f"HOROVOD_{n.upper()}": str(v) for n, v in fields.items()}


def place_ranks(hosts: Sequence[str]) -> list[RankPlacement]:
    """Place each rank on its host."""
    sizes = collections.Counter(hosts)
    # For each local rank, the numbers of the hosts that have it.
    crossing: list[dict[str, int]] = []
    for local in range(max(sizes.values(), default=0)):
        there = (host for host, size in sizes.items() if size > local)
        crossing.append({host: number for number, host in enumerate(there)})
    seen: collections.Counter[str] = collections.Counter()
    placements = []
    for rank, host in enumerate(hosts):
        local = seen[host]
        seen[host] += 1
        placements.append(
            RankPlacement(
                hostname=host,
                rank=rank,
                size=len(hosts),
                local_rank=local,
                local_size=sizes[host],
                cross_rank=crossing[local][host],
                cross_size=len(crossing[local]),
            )
        )
    return placements


def fill_slots(
    hosts: Mapping[str, int], most: int | None
) -> list[RankPlacement]:
    """Place at most this many ranks, filling one host after another."""
    slots = [host for host, count in hosts.items() for _ in range(count)]
    return place_ranks(slots[:most])
