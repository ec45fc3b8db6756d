"""Launchers of several processes, recognized by the variables they set.

Other packages can add launchers by entry points in the group
``keras_towers.launchers``, such as ``mine = my_package.module:MyLauncher``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import ClassVar, Self

import psutil

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.import_hooks import broken_entry, load_entry
from keras_towers.foundation.settings import (
    ENV_JOB,
    ENV_RANK,
    ENV_RENDEZVOUS,
    ENV_SECRET,
    ENV_SIZE,
)
from keras_towers.jobs.rendezvous.hosts import expand_nodes

GROUP = "keras_towers.launchers"


class ClusterEnvironment:
    """A process started by a launcher as one of several.

    A subclass describes a launcher by class attributes. Those that end in
    ``_in`` name the environment variables that hold a value. To make
    keras_towers find the subclass, name it in an entry point.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks; None if the launcher does not set it.
        one_machine: whether all ranks are known to run on this machine.
        address: the host of rank 0; empty if the launcher does not set it.
        speaks_mpi: whether an MPI library finds the other ranks.
        job: the values that identify the job; empty if there are none.

    Example:
        >>> class Flock(ClusterEnvironment):
        ...     name = "flock"  # in messages
        ...     rank_in, size_in = "FLOCK_RANK", "FLOCK_SIZE"
        ...     address_in = "FLOCK_FIRST_HOST"  # if it is set
        ...     job_in = ("FLOCK_JOB",)  # what differs between jobs

        In the package's ``pyproject.toml``::

            [project.entry-points."keras_towers.launchers"]
            flock = "my_package:Flock"
    """

    name: ClassVar[str]
    """The launcher, for messages."""
    rank_in: ClassVar[str] = ""
    size_in: ClassVar[str] = ""
    local_size_in: ClassVar[str] = ""
    address_in: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """Variables that this launcher sets, and similar launchers do not."""
    job_in: ClassVar[tuple[str, ...]] = ()
    """Variables that together identify the job."""
    mpi_in: ClassVar[tuple[str, ...]] = ()
    """Variables any of which means that an MPI library finds the ranks."""
    may_start_others: ClassVar[bool] = True
    """Whether its only process may start others, of which it says nothing."""
    horovod_reads_variables: ClassVar[bool] = False
    """Whether Horovod reads the launcher's variables."""
    how_to_connect: ClassVar[str] = (
        "HorovodStrategy trains one model in all of them."
    )
    how_to_train_alone: ClassVar[str] = (
        f"If that is what you want, set {ENV_RANK}=0 and {ENV_SIZE}=1 for "
        "every process."
    )

    def __init__(self, variables: Mapping[str, str]):
        self.rank: int = whole_number_in(variables, self.rank_in) or 0
        self.size: int | None = whole_number_in(variables, self.size_in)
        local_size = whole_number_in(variables, self.local_size_in)
        self.one_machine: bool = (
            local_size is not None and local_size == self.size
        )
        self.address: str = variables.get(self.address_in, "")
        self.speaks_mpi: bool = any(name in variables for name in self.mpi_in)
        self._rendezvous = variables.get(ENV_RENDEZVOUS, "")
        names = (ENV_JOB,) if ENV_JOB in variables else self.job_in
        self.job: str = " ".join(
            variables[name] for name in names if name in variables
        )

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Self | None:
        """Return the environment; None if another launcher is used."""
        if whole_number_in(variables, cls.rank_in) is None:
            return None
        if any(name not in variables for name in cls.needs):
            return None
        return cls(variables)

    @property
    def is_single_process(self) -> bool:
        """Whether the launcher says that there are no other processes."""
        return self.size == 1

    def identity(self) -> str:
        """A text shared by the ranks of this job and by no other job."""
        known = f"{self.job} {self._rendezvous}".strip()
        if self.one_machine and not known:
            known = session_parent()
        if known:
            return known
        raise TowerError(
            f"{self.name} does not tell the ranks which job they belong to: "
            f"set {ENV_JOB} to a word that is the same on all ranks of this "
            f"job and differs between jobs, or {ENV_RENDEZVOUS} and "
            f"{ENV_SECRET}."
        )

    def __str__(self) -> str:
        total = "" if self.size is None else f" of {self.size}"
        return f"rank {self.rank}{total} that {self.name} started"


class Horovodrun(ClusterEnvironment):
    """A rank of ``keras-towers run``, or of Horovod's own launcher."""

    name = "keras-towers run or horovodrun"
    rank_in, size_in = "HOROVOD_RANK", "HOROVOD_SIZE"
    may_start_others = False
    horovod_reads_variables = True
    how_to_train_alone = (
        "To train in this process alone, unset HOROVOD_RANK and HOROVOD_SIZE."
    )


class UserSet(ClusterEnvironment):
    """A process whose rank the user has set, whatever launched it."""

    name = rank_in = ENV_RANK
    size_in = ENV_SIZE
    may_start_others = False

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Self | None:
        for name in (ENV_RANK, ENV_SIZE):
            text = variables.get(name, "")
            if text and not text.isdecimal():
                raise TowerError(f"{name} is {text!r}: give a whole number.")
        return super().from_variables(variables)


class EnvironmentVariables(ClusterEnvironment):
    """A launcher that sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``."""

    name = "a launcher that sets RANK and WORLD_SIZE"
    rank_in, size_in, local_size_in = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    needs = ("WORLD_SIZE",)
    job_in: ClassVar[tuple[str, ...]] = ("MASTER_ADDR", "MASTER_PORT")
    address_in = "MASTER_ADDR"


class Torchrun(EnvironmentVariables):
    """``torchrun``; each of its restarts is a new job."""

    name = "torchrun"
    may_start_others = False
    needs = ("TORCHELASTIC_RUN_ID",)
    job_in = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        *EnvironmentVariables.job_in,
    )


class OpenMPI(ClusterEnvironment):
    """Open MPI's ``mpirun``."""

    name = "mpirun"
    rank_in, size_in = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local_size_in = "OMPI_COMM_WORLD_LOCAL_SIZE"
    job_in = (
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_hnp_uri",
    )
    mpi_in = (rank_in,)


class Hydra(ClusterEnvironment):
    """``mpiexec`` of MPICH and Intel MPI."""

    name = "mpiexec"
    rank_in, size_in, local_size_in = "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"
    needs = ("MPI_LOCALRANKID",)
    job_in = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    mpi_in = (rank_in,)

    def identity(self) -> str:
        # mpiexec sets nothing that distinguishes several jobs of an allocation,
        # but it starts every rank as the leader of a session.
        if self.one_machine:
            return f"{self.job} {session_parent()}"
        return super().identity()


class PMI(ClusterEnvironment):
    """Another launcher that speaks PMI, such as Cray's or Flux."""

    name = "a launcher with PMI"
    rank_in, size_in, local_size_in = "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE"
    job_in = ("PMI_JOBID", "PALS_APID", "FLUX_JOB_ID")
    mpi_in = (rank_in,)


class PMIx(ClusterEnvironment):
    """Another launcher that speaks PMIx; the number of ranks is unknown."""

    name = "a launcher with PMIx"
    rank_in, size_in = "PMIX_RANK", ENV_SIZE
    job_in = ("PMIX_NAMESPACE",)
    mpi_in = (rank_in,)


class IndexedJob(ClusterEnvironment):
    """A pod of an indexed Job."""

    name = "Kubernetes (an indexed Job)"
    rank_in, size_in = "JOB_COMPLETION_INDEX", ENV_SIZE


class Slurm(ClusterEnvironment):
    """A task of ``srun``."""

    name = "srun"
    rank_in, size_in = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    # A batch script has the other variables, too.
    needs = ("SLURM_STEP_NUM_TASKS",)
    job_in = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    mpi_in = ("PMI_RANK", "PMIX_RANK")

    def __init__(self, variables: Mapping[str, str]):
        super().__init__(variables)
        self.one_machine = (
            whole_number_in(variables, "SLURM_STEP_NUM_NODES") == 1
        )
        nodes = expand_nodes(variables.get("SLURM_STEP_NODELIST", ""))
        self.address = nodes[0] if nodes else ""


# These say what the user wants, whatever launcher runs around them.
_CHOSEN: tuple[type[ClusterEnvironment], ...] = (Horovodrun, UserSet)
# A launcher comes before those that may have started it: mpirun, for example,
# starts its daemons by srun, whose variables the ranks inherit.
_KNOWN: tuple[type[ClusterEnvironment], ...] = (
    Torchrun,
    OpenMPI,
    Hydra,
    Slurm,
    PMI,
    PMIx,
    IndexedJob,
    EnvironmentVariables,
)
LAUNCHERS: tuple[type[ClusterEnvironment], ...] = (*_CHOSEN, *_KNOWN)
"""The launchers of this package, in the order in which they are asked."""


@functools.cache
def added() -> tuple[type[ClusterEnvironment], ...]:
    """Import the launchers that other packages add.

    Raises:
        TowerError: an entry point is broken. Without its launcher, each process
            would train a model of its own.
    """
    launchers = []
    for entry in entry_points(group=GROUP):
        launcher = load_entry(entry, "launcher")
        is_class = isinstance(launcher, type)
        if not is_class or not issubclass(launcher, ClusterEnvironment):
            cause = f"is {launcher!r}, not a subclass of ClusterEnvironment"
            raise broken_entry(entry, "launcher", cause)
        if not launcher.rank_in or not getattr(launcher, "name", ""):
            cause = "does not set the class attributes name and rank_in"
            raise broken_entry(entry, "launcher", cause)
        launchers.append(launcher)
    return tuple(launchers)


def detect(
    variables: Mapping[str, str] = os.environ,
) -> ClusterEnvironment | None:
    """Detect the launcher of this process; None if there is none.

    Raises:
        TowerError: variables that the user has set contradict one another.
    """
    launchers = (*_CHOSEN, *added(), *_KNOWN)
    environments = (
        launcher.from_variables(variables) for launcher in launchers
    )
    first = next(filter(None, environments), None)
    if first and not (first.is_single_process and first.may_start_others):
        return first
    # One task of srun, for example, may start processes by itself.
    inner = EnvironmentVariables.from_variables(variables)
    if inner is None and "TF_CONFIG" not in variables:
        _refuse_without_rank(variables)
    return inner or first


def _refuse_without_rank(variables: Mapping[str, str]) -> None:
    """Refuse to be one of several processes without knowing the rank."""
    for chosen in _CHOSEN:
        size = whole_number_in(variables, chosen.size_in) or 1
        if size > 1:
            raise TowerError(
                f"{chosen.size_in} is {size}, but nothing says which of the "
                f"{size} processes this is: set {chosen.rank_in} to a number "
                f"from 0 to {size - 1}, or unset {chosen.size_in}."
            )


def detect_foreign() -> ClusterEnvironment | None:
    """Detect a launcher of several processes, other than ours and Horovod's."""
    task = detect()
    if task and (task.horovod_reads_variables or task.is_single_process):
        return None
    return task


def whole_number_in(variables: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in a variable; None if it has none."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


def session_parent() -> str:
    """Return the process that started this process's session, or ""."""
    parent = psutil.Process(os.getsid(0)).parent()
    return f"{parent.pid} {parent.create_time()}" if parent else ""
