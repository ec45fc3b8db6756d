"""The launchers and managers of clusters that a process may run under."""

from __future__ import annotations

import os
from collections.abc import Mapping

from keras_towers.meeting.environments.base import ClusterEnvironment
from keras_towers.meeting.environments.batch import LSF, PBS
from keras_towers.meeting.environments.kubernetes import IndexedJob, MPIOperator
from keras_towers.meeting.environments.mpi import PMI, Hydra, OpenMPI, PMIx
from keras_towers.meeting.environments.own import ByHand, Horovodrun
from keras_towers.meeting.environments.slurm import Slurm
from keras_towers.meeting.environments.torchrun import (
    EnvironmentVariables,
    Torchrun,
)
from keras_towers.settings import RANK, SIZE

__all__ = [
    "HOW_TO_BE_ALONE",
    "LAUNCHERS",
    "MANAGERS",
    "ClusterEnvironment",
    "allocation",
    "detect",
]

HOW_TO_BE_ALONE: str = (
    f"If that is what you want, set {RANK}=0 and {SIZE}=1 for every process."
)

# The one that has started the process itself comes first: mpirun, for example,
# starts its daemons by srun, whose variables the ranks inherit.
LAUNCHERS: tuple[type[ClusterEnvironment], ...] = (
    *(Horovodrun, ByHand, Torchrun, OpenMPI, Hydra, Slurm),
    *(PMI, PMIx, IndexedJob, EnvironmentVariables),
)
MANAGERS: dict[str, type[ClusterEnvironment]] = {
    **{"Slurm": Slurm, "PBS": PBS, "LSF": LSF},
    MPIOperator.name: MPIOperator,
}


def detect(
    variables: Mapping[str, str] = os.environ,
) -> ClusterEnvironment | None:
    """This process as one of several, None if nothing says so."""
    found = (launcher.detect(variables) for launcher in LAUNCHERS)
    return next(filter(None, found), None)


def allocation(
    variables: Mapping[str, str] = os.environ,
) -> tuple[str, dict[str, int]] | None:
    """The manager of this job's hosts, and the number of processes on each."""
    for manager, environment in MANAGERS.items():
        hosts = environment.hosts(variables)
        if hosts:
            return manager, hosts
    return None
