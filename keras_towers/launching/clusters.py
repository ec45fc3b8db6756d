"""What launchers other than ours tell a process: that it is one of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from keras_towers.launching.allocation import expand_nodes

RANK = "KERAS_TOWERS_RANK"
SIZE = "KERAS_TOWERS_SIZE"
JOB = "KERAS_TOWERS_JOB"

HOW_TO_BE_ALONE: str = (
    f"If that is what you want, set {RANK}=0 and {SIZE}=1 for every process."
)


@dataclass(frozen=True)
class Member:
    """A process that a launcher has made one of several.

    Attributes:
        launcher: its name, for messages.
        rank: this process among them.
        size: how many there are; None where the launcher does not tell.
        job: what only processes of this job have in common; may be empty.
        one_machine: whether all are known to run on this machine.
        address: a name of rank 0's machine, empty where it is not told.
        speaks_mpi: whether an MPI library finds the others by itself.
        placed: whether the launcher has told Horovod, too.
    """

    launcher: str
    rank: int
    size: int | None
    job: str
    one_machine: bool
    address: str
    speaks_mpi: bool
    placed: bool

    @property
    def alone(self) -> bool:
        """Whether there are no others, as far as the launcher tells."""
        return self.size == 1

    def __str__(self) -> str:
        of = f" of {self.size}" if self.size else ""
        return f"rank {self.rank}{of} that {self.launcher} started"


@dataclass(frozen=True)
class _Launcher:
    """The variables that a launcher sets.

    Attributes:
        name: what it is called in messages.
        rank: how a process learns which one it is.
        size: how many there are.
        needs: variables without which it was another launcher.
        here: how many there are on this machine.
        nodes: how many machines there are.
        job: together they tell this job from others.
        address: rank 0's machine, or a list of nodes that begins with it.
        mpi: any of these: an MPI library finds the others.
        placed: whether Horovod reads these variables.
    """

    name: str
    rank: str
    size: str
    needs: tuple[str, ...] = ()
    here: str = ""
    nodes: str = ""
    job: tuple[str, ...] = ()
    address: str = ""
    mpi: tuple[str, ...] = ()
    placed: bool = False


# The one that has started the process itself comes first: mpirun, for example,
# starts its daemons by srun, whose variables the ranks inherit.
_LAUNCHERS = (
    _Launcher(
        "keras-towers run or horovodrun",
        *("HOROVOD_RANK", "HOROVOD_SIZE"),
        placed=True,
    ),
    _Launcher(RANK, RANK, SIZE),
    _Launcher(
        *("torchrun", "RANK", "WORLD_SIZE"),
        needs=("TORCHELASTIC_RUN_ID",),
        here="LOCAL_WORLD_SIZE",
        job=(
            *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
            *("MASTER_ADDR", "MASTER_PORT"),
        ),
        address="MASTER_ADDR",
    ),
    _Launcher(
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        here="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=(
            *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
            "OMPI_MCA_orte_hnp_uri",
        ),
        mpi=("OMPI_COMM_WORLD_RANK",),
    ),
    _Launcher(
        *("mpiexec", "PMI_RANK", "PMI_SIZE"),
        needs=("MPI_LOCALRANKID",),
        here="MPI_LOCALNRANKS",
        job=("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
        mpi=("PMI_RANK",),
    ),
    _Launcher(
        *("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        # A batch script has the rest of them, too.
        needs=("SLURM_STEP_NUM_TASKS",),
        nodes="SLURM_STEP_NUM_NODES",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        address="SLURM_STEP_NODELIST",
        mpi=("PMI_RANK", "PMIX_RANK"),
    ),
    _Launcher(
        *("a launcher with PMI", "PMI_RANK", "PMI_SIZE"),
        here="PMI_LOCAL_SIZE",
        job=("PMI_JOBID", "PALS_APID", "FLUX_JOB_ID"),
        mpi=("PMI_RANK",),
    ),
    _Launcher(
        *("a launcher with PMIx", "PMIX_RANK", SIZE),
        job=("PMIX_NAMESPACE",),
        mpi=("PMIX_RANK",),
    ),
    _Launcher(
        *("Kubernetes (an indexed Job)", "JOB_COMPLETION_INDEX", SIZE),
    ),
    _Launcher(
        *("a launcher that sets RANK and WORLD_SIZE", "RANK", "WORLD_SIZE"),
        needs=("WORLD_SIZE",),
        here="LOCAL_WORLD_SIZE",
        job=("MASTER_ADDR", "MASTER_PORT"),
        address="MASTER_ADDR",
    ),
)

RANK_VARIABLES: tuple[str, ...] = tuple(one.rank for one in _LAUNCHERS)
"""A process without any of these was started by no launcher."""


def member(environment: Mapping[str, str] = os.environ) -> Member | None:
    """This process as one of several, None if nothing says so.

    Args:
        environment: its variables.
    """
    for launcher in _LAUNCHERS:
        rank = _number(environment, launcher.rank)
        if rank is not None and all(
            name in environment for name in launcher.needs
        ):
            return _describe(launcher, rank, environment)
    return None


def _describe(
    launcher: _Launcher, rank: int, environment: Mapping[str, str]
) -> Member:
    size = _number(environment, launcher.size)
    here = _number(environment, launcher.here)
    nodes = _number(environment, launcher.nodes)
    known = [environment[name] for name in launcher.job if name in environment]
    if JOB in environment:
        known = [environment[JOB]]
    return Member(
        launcher=launcher.name,
        rank=rank,
        size=size,
        job=" ".join(known),
        one_machine=nodes == 1 or (here is not None and here == size),
        address=next(
            iter(expand_nodes(environment.get(launcher.address, ""))), ""
        ),
        speaks_mpi=any(name in environment for name in launcher.mpi),
        placed=launcher.placed,
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
