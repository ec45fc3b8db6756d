"""The interface of cluster environments: a process as one of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar, Self

import psutil

from keras_towers.errors import TowerError
from keras_towers.settings import JOB, RENDEZVOUS, SECRET


class ClusterEnvironment:
    """A process that a launcher has made one of several.

    A subclass names the variables of one launcher, and may know more of it.

    Attributes:
        size: the number of processes; None where the launcher does not tell.
        address: a name of rank 0's machine; may be empty.
        job: common to the processes of this job alone; may be empty.
    """

    name: ClassVar[str]
    """The launcher or the manager of the cluster, for messages."""
    rank_in: ClassVar[str] = ""
    size_in: ClassVar[str] = ""
    local_size_in: ClassVar[str] = ""
    address_in: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """Variables without which another launcher has set the others."""
    job_in: ClassVar[tuple[str, ...]] = ()
    """Variables that together tell this job from others."""
    mpi_in: ClassVar[tuple[str, ...]] = ()
    """Variables of which each says that an MPI library finds the others."""
    placed: ClassVar[bool] = False
    """Whether Horovod reads the launcher's variables."""

    def __init__(self, variables: Mapping[str, str]):
        self.rank: int = number(variables, self.rank_in) or 0
        self.size: int | None = number(variables, self.size_in)
        here = number(variables, self.local_size_in)
        self.one_machine: bool = here is not None and here == self.size
        self.address: str = variables.get(self.address_in, "")
        self.speaks_mpi: bool = any(name in variables for name in self.mpi_in)
        names = (JOB,) if JOB in variables else self.job_in
        self.job: str = " ".join(
            variables[name] for name in names if name in variables
        )

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> Self | None:
        """The environment, None if another launcher started the process."""
        if number(variables, cls.rank_in) is None:
            return None
        if any(name not in variables for name in cls.needs):
            return None
        return cls(variables)

    @classmethod
    def hosts(cls, variables: Mapping[str, str]) -> dict[str, int]:
        """The number of processes for each host of an allocation."""
        del variables
        return {}

    @property
    def alone(self) -> bool:
        """Whether there are no others, as far as the launcher tells."""
        return self.size == 1

    def identity(self) -> str:
        """A text common to the ranks of this job, and to no others."""
        known = f"{self.job} {os.environ.get(RENDEZVOUS, '')}".strip()
        if self.one_machine and not known:
            known = starter()
        if known:
            return known
        raise TowerError(
            f"{self.name} does not tell the ranks which job they belong to: "
            f"set {JOB} to the same word for all ranks of this job and no "
            f"other, or {RENDEZVOUS} and {SECRET}."
        )

    def __str__(self) -> str:
        of = f" of {self.size}" if self.size else ""
        return f"rank {self.rank}{of} that {self.name} started"


def number(variables: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable, None if there is none."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


def starter() -> str:
    """The process that started the session of this one; may be empty."""
    parent = psutil.Process(os.getsid(0)).parent()
    return f"{parent.pid} {parent.create_time()}" if parent else ""
