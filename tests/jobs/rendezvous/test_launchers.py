"""The ranks that launchers name."""

import sys

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import launchers
from keras_towers.jobs.rendezvous.launchers import detect
from tests.kit.scripts import parse_variables

pytestmark = pytest.mark.core


OPEN_MPI = parse_variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4"
    " PMIX_RANK=1 PMIX_NAMESPACE=1393950721"
)
BATCH_SCRIPT = parse_variables(
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2]"
    " SLURM_TASKS_PER_NODE=2(x2)"
)
STEP = BATCH_SCRIPT | parse_variables(
    "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2"
    " SLURM_STEP_NODELIST=n[1-2] SLURM_PROCID=3"
)
HYDRA = parse_variables(
    "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"
)
TORCHRUN = parse_variables(
    "RANK=2 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29400"
    " TORCHELASTIC_RUN_ID=none"
)
PROCESSES = parse_variables(
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29400"
)
INDEXED = parse_variables("JOB_COMPLETION_INDEX=1")
ALONE = "KERAS_TOWERS_RANK=0 KERAS_TOWERS_SIZE=1"
KUBERNETES = "Kubernetes (an indexed Job)"


@pytest.mark.parametrize(
    ("environment", "more", "found"),
    [
        (OPEN_MPI, "", ("mpirun", 1, 4, True, "", True)),
        (HYDRA, "", ("mpiexec", 0, 2, True, "", True)),
        (STEP, "PMI_RANK=3 PMI_SIZE=4", ("srun", 3, 4, False, "n1", True)),
        (TORCHRUN, "", ("torchrun", 2, 4, False, "n1", False)),
        (INDEXED, "KERAS_TOWERS_SIZE=2", (KUBERNETES, 1, 2, False, "", False)),
        # The launcher's daemons are tasks of srun, its ranks are not.
        (STEP | OPEN_MPI, "", ("mpirun", 1, 4, True, "", True)),
        # One task starts several processes, which know their ranks.
        (
            STEP | PROCESSES,
            "SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
            ("a launcher that sets RANK and WORLD_SIZE", 1, 2)
            + (False, "n1", False),
        ),
        (STEP | PROCESSES, "", ("srun", 3, 4, False, "n1", False)),
        # The user wants every process to train separately.
        (OPEN_MPI, ALONE, ("KERAS_TOWERS_RANK", 0, 1, False, "", False)),
    ],
)
def test_the_launcher(environment, more, found):
    one = detect(environment | parse_variables(more))
    assert not one.horovod_reads_variables
    assert found == (
        *(one.name, one.rank, one.size, one.one_machine),
        *(one.address, one.speaks_mpi),
    )
    ours = parse_variables("HOROVOD_RANK=1 HOROVOD_SIZE=2")
    assert detect(environment | ours).horovod_reads_variables


@pytest.mark.parametrize(
    "environment", [{}, BATCH_SCRIPT, {"RANK": "3"}, {"PMI_RANK": "many"}]
)
def test_no_launcher(environment):
    assert detect(environment) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ("KERAS_TOWERS_SIZE=2", "KERAS_TOWERS_SIZE is 2, .* KERAS_TOWERS_RANK"),
        ("HOROVOD_SIZE=3", "HOROVOD_SIZE is 3, .* HOROVOD_RANK .* from 0 to 2"),
        # It may start others, as this variable says, but not which this is.
        (
            "KERAS_TOWERS_SIZE=2 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0",
            "KERAS_TOWERS_SIZE is 2",
        ),
    ],
)
def test_a_number_of_processes_without_a_rank_is_refused(environment, said):
    with pytest.raises(TowerError, match=said):
        detect(parse_variables(environment))
    detect(parse_variables("KERAS_TOWERS_SIZE=1"))


def test_jobs_are_distinguished():
    jobs = [
        *(OPEN_MPI, OPEN_MPI | {"PMIX_NAMESPACE": "2"}),
        *(STEP, STEP | {"SLURM_STEP_ID": "1"}),
        *(TORCHRUN, TORCHRUN | {"MASTER_PORT": "29401"}),
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"},
        OPEN_MPI | {"KERAS_TOWERS_JOB": "mine"},
    ]
    assert len({detect(job).job for job in jobs}) == len(jobs)
    assert detect(OPEN_MPI).job == detect({**OPEN_MPI, "PMIX_RANK": "0"}).job


PACKAGE = """
from keras_towers.jobs.rendezvous.launchers import ClusterEnvironment

class Flock(ClusterEnvironment):
    name = "flock"
    rank_in, size_in, address_in = "FLOCK_RANK", "FLOCK_SIZE", "FLOCK_HOST"
    job_in = ("FLOCK_JOB",)

class Nameless(ClusterEnvironment):
    rank_in = "FLOCK_RANK"
"""
FLOCK = parse_variables("FLOCK_RANK=2 FLOCK_SIZE=4 FLOCK_HOST=n1 FLOCK_JOB=7")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with an entry point that has a value."""
    (tmp_path / "flock_package.py").write_text(PACKAGE)
    folder = tmp_path / "flock_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: flock-package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def with_entry(value):
        text = f"[keras_towers.launchers]\nflock = {value}\n"
        (folder / "entry_points.txt").write_text(text)
        launchers.added.cache_clear()

    yield with_entry
    sys.modules.pop("flock_package", None)
    launchers.added.cache_clear()


def test_a_package_adds_a_launcher(install):
    assert detect(FLOCK) is None
    install("flock_package:Flock")
    # It may have been started as a task of srun.
    found = detect(STEP | FLOCK)
    assert str(found) == "rank 2 of 4 that flock started"
    assert (found.address, found.job) == ("n1", "7")
    assert detect(STEP).name == "srun"
    # What the user has chosen comes first.
    assert detect(FLOCK | parse_variables(ALONE)).is_single_process


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("flock_package.gone:Flock", "ModuleNotFoundError: "),
        ("flock_package:Gone", "AttributeError: "),
        ("flock_package:__name__", "is 'flock_package', not a subclass"),
        ("flock_package:Nameless", "does not set .* name and rank_in"),
    ],
)
def test_the_package_of_a_broken_launcher_is_named(install, value, cause):
    install(value)
    said = f"launcher 'flock' of the package flock-package.*{value}.*{cause}"
    with pytest.raises(TowerError, match=said):
        detect({})
