"""Processes of ``mpirun`` and ``mpiexec``, and of launchers with PMI."""

from keras_towers.meeting.environments.base import ClusterEnvironment, starter
from keras_towers.settings import SIZE


class OpenMPI(ClusterEnvironment):
    """Open MPI's ``mpirun``."""

    name = "mpirun"
    rank_in, size_in = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local_size_in = "OMPI_COMM_WORLD_LOCAL_SIZE"
    job_in = (
        *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
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
        # An allocation may run several jobs, of which mpiexec says nothing;
        # but it starts every rank as the leader of a session.
        if self.one_machine:
            return f"{self.job} {starter()}"
        return super().identity()


class PMI(ClusterEnvironment):
    """Another launcher that speaks PMI, such as Cray's or Flux."""

    name = "a launcher with PMI"
    rank_in, size_in, local_size_in = "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_SIZE"
    job_in = ("PMI_JOBID", "PALS_APID", "FLUX_JOB_ID")
    mpi_in = (rank_in,)


class PMIx(ClusterEnvironment):
    """Another launcher that speaks PMIx, which tells no number of ranks."""

    name = "a launcher with PMIx"
    rank_in, size_in = "PMIX_RANK", SIZE
    job_in = ("PMIX_NAMESPACE",)
    mpi_in = (rank_in,)
