"""Kubernetes: pods of an indexed Job, and hosts of the MPI Operator."""

from collections.abc import Mapping
from pathlib import Path

from keras_towers.meeting.environments.base import ClusterEnvironment
from keras_towers.meeting.hosts import parse_hostfile
from keras_towers.settings import SIZE


class IndexedJob(ClusterEnvironment):
    """A pod of an indexed Job."""

    name = "Kubernetes (an indexed Job)"
    rank_in, size_in = "JOB_COMPLETION_INDEX", SIZE


class MPIOperator(ClusterEnvironment):
    """The launcher's pod of an MPIJob."""

    name = "the MPI Operator"

    @classmethod
    def hosts(cls, variables: Mapping[str, str]) -> dict[str, int]:
        names = "OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE"
        told = [variables[name] for name in names if name in variables]
        file = Path(told[0] if told else "/etc/mpi/hostfile")
        return parse_hostfile(file) if file.is_file() else {}
