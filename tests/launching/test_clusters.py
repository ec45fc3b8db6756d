"""What is read from the variables of each launcher."""

import pytest

from keras_towers.launching.clusters import member

pytestmark = pytest.mark.core

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1393950721",
}
BATCH_SCRIPT = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "3",
}
HYDRA = {
    "PMI_RANK": "0",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
INDEXED = {"JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (OPEN_MPI, ("mpirun", 1, 4, True, "", True)),
        (HYDRA, ("mpiexec", 0, 2, True, "", True)),
        (BATCH_SCRIPT | STEP, ("srun", 3, 4, False, "n1", False)),
        (
            BATCH_SCRIPT | STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"},
            ("srun", 3, 4, False, "n1", True),
        ),
        (TORCHRUN, ("torchrun", 2, 4, False, "n1", False)),
        (
            INDEXED | {"KERAS_TOWERS_SIZE": "2"},
            ("Kubernetes (an indexed Job)", 1, 2, False, "", False),
        ),
        (INDEXED, ("Kubernetes (an indexed Job)", 1, None, False, "", False)),
        # The launcher's daemons are tasks of srun, its ranks are not.
        (BATCH_SCRIPT | STEP | OPEN_MPI, ("mpirun", 1, 4, True, "", True)),
        # Every process is told to train a model of its own.
        (
            OPEN_MPI | {"KERAS_TOWERS_RANK": "0", "KERAS_TOWERS_SIZE": "1"},
            ("KERAS_TOWERS_RANK", 0, 1, False, "", False),
        ),
    ],
)
def test_member(variables, found):
    one = member(variables)
    assert found == (
        *(one.launcher, one.rank, one.size, one.one_machine),
        *(one.address, one.speaks_mpi),
    )


@pytest.mark.parametrize(
    "variables", [{}, BATCH_SCRIPT, {"RANK": "3"}, {"PMI_RANK": "many"}]
)
def test_no_member(variables):
    assert member(variables) is None


def test_ours_are_placed_whatever_started_us():
    ours = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    assert member(ours | OPEN_MPI | STEP).placed
    assert not member(OPEN_MPI).placed


def test_jobs_are_told_apart():
    jobs = [
        *(OPEN_MPI, OPEN_MPI | {"PMIX_NAMESPACE": "2"}),
        *(BATCH_SCRIPT | STEP, BATCH_SCRIPT | STEP | {"SLURM_STEP_ID": "1"}),
        *(TORCHRUN, TORCHRUN | {"MASTER_PORT": "29401"}),
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"},
        OPEN_MPI | {"KERAS_TOWERS_JOB": "mine"},
    ]
    assert len({member(job).job for job in jobs}) == len(jobs)
    assert member(OPEN_MPI).job == member({**OPEN_MPI, "PMIX_RANK": "0"}).job
