"""Steps and allocations of Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keras_towers.meeting.environments.base import ClusterEnvironment, number

# A shell that salloc opened is a step too, with this number.
_INTERACTIVE_STEP = "4294967290"


class Slurm(ClusterEnvironment):
    """A task of ``srun``, or an allocation of ``sbatch`` or ``salloc``."""

    name = "srun"
    rank_in, size_in = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    # A batch script has the rest of them, too.
    needs = ("SLURM_STEP_NUM_TASKS",)
    job_in = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    mpi_in = ("PMI_RANK", "PMIX_RANK")

    def __init__(self, variables: Mapping[str, str]):
        super().__init__(variables)
        self.one_machine = number(variables, "SLURM_STEP_NUM_NODES") == 1
        nodes = expand_nodes(variables.get("SLURM_STEP_NODELIST", ""))
        self.address = nodes[0] if nodes else ""

    @classmethod
    def hosts(cls, variables: Mapping[str, str]) -> dict[str, int]:
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
