"""What launchers and managers of clusters tell of ranks and hosts."""

import pytest

from keras_towers import TowerError
from keras_towers.rendezvous.hosts import allocation, fill_slots, place_ranks
from keras_towers.rendezvous.launchers import detect
from tests.launching.jobs import variables

pytestmark = pytest.mark.core


OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4"
    " PMIX_RANK=1 PMIX_NAMESPACE=1393950721"
)
BATCH_SCRIPT = variables(
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2]"
    " SLURM_TASKS_PER_NODE=2(x2)"
)
STEP = BATCH_SCRIPT | variables(
    "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2"
    " SLURM_STEP_NODELIST=n[1-2] SLURM_PROCID=3"
)
HYDRA = variables("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2")
TORCHRUN = variables(
    "RANK=2 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29400"
    " TORCHELASTIC_RUN_ID=none"
)
INDEXED = variables("JOB_COMPLETION_INDEX=1")
ALONE = "KERAS_TOWERS_RANK=0 KERAS_TOWERS_SIZE=1"
KUBERNETES = "Kubernetes (an indexed Job)"


@pytest.mark.parametrize(
    ("told", "more", "found"),
    [
        (OPEN_MPI, "", ("mpirun", 1, 4, True, "", True)),
        (HYDRA, "", ("mpiexec", 0, 2, True, "", True)),
        (STEP, "PMI_RANK=3 PMI_SIZE=4", ("srun", 3, 4, False, "n1", True)),
        (TORCHRUN, "", ("torchrun", 2, 4, False, "n1", False)),
        (INDEXED, "KERAS_TOWERS_SIZE=2", (KUBERNETES, 1, 2, False, "", False)),
        # The launcher's daemons are tasks of srun, its ranks are not.
        (STEP | OPEN_MPI, "", ("mpirun", 1, 4, True, "", True)),
        # Every process is told to train a model of its own.
        (OPEN_MPI, ALONE, ("KERAS_TOWERS_RANK", 0, 1, False, "", False)),
    ],
)
def test_the_launcher(told, more, found):
    one = detect(told | variables(more))
    assert not one.horovod_reads_variables
    assert found == (
        *(one.name, one.rank, one.size, one.one_machine),
        *(one.address, one.speaks_mpi),
    )
    ours = variables("HOROVOD_RANK=1 HOROVOD_SIZE=2")
    assert detect(told | ours).horovod_reads_variables


@pytest.mark.parametrize(
    "told", [{}, BATCH_SCRIPT, {"RANK": "3"}, {"PMI_RANK": "many"}]
)
def test_no_launcher(told):
    assert detect(told) is None


def test_jobs_are_told_apart():
    jobs = [
        *(OPEN_MPI, OPEN_MPI | {"PMIX_NAMESPACE": "2"}),
        *(STEP, STEP | {"SLURM_STEP_ID": "1"}),
        *(TORCHRUN, TORCHRUN | {"MASTER_PORT": "29401"}),
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"},
        OPEN_MPI | {"KERAS_TOWERS_JOB": "mine"},
    ]
    assert len({detect(job).job for job in jobs}) == len(jobs)
    assert detect(OPEN_MPI).job == detect({**OPEN_MPI, "PMIX_RANK": "0"}).job


SLURM = (
    "SLURM_JOB_NODELIST=n[1-3] SLURM_TASKS_PER_NODE=2(x2),1 SLURMD_NODENAME=n2"
)
OF_STEP = (
    f"{SLURM} SLURM_STEP_NODELIST=n2 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_ID"
)
NODES = "gpu1 r1n09.x r1n10.x r1n7.x r2n09.x r2n10.x r2n7.x 10.0.0.1"
ALLOCATED = {"n1": 2, "localhost": 2, "n3": 1}
MPI_OPERATOR = "the MPI Operator"


@pytest.mark.parametrize(
    ("told", "text", "manager", "hosts"),
    [
        (SLURM, "", "Slurm", ALLOCATED),
        (f"{OF_STEP}=0", "", "Slurm", {"localhost": 1}),
        (
            "SLURM_JOB_NODELIST=gpu1,r[1-2]n[09-10,7].x,10.0.0.1",
            *("", "Slurm", dict.fromkeys(NODES.split(), 1)),
        ),
        # A shell that salloc has opened.
        (f"{OF_STEP}=4294967290", "", "Slurm", ALLOCATED),
        ("PBS_NODEFILE=hosts", "a\na\nb.x\n", "PBS", {"a": 2, "b.x": 1}),
        (
            "OMPI_MCA_orte_default_hostfile=hosts",
            *("w-0.svc slots=2\nw-1 slots=1\n", MPI_OPERATOR),
            {"w-0.svc": 2, "w-1": 1},
        ),
        ("I_MPI_HYDRA_HOST_FILE=hosts", "w-0:3\n", MPI_OPERATOR, {"w-0": 3}),
    ],
)
def test_allocation(tmp_path, monkeypatch, told, text, manager, hosts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(text)
    found = allocation(variables(told))
    assert found == (manager, hosts)


def test_allocation_without_a_file():
    assert allocation({"LSB_MCPU_HOSTS": "a 4 b 2"})[1] == {"a": 4, "b": 2}
    assert allocation({}) is None
    with pytest.raises(TowerError, match="list of this job's hosts"):
        allocation({"PBS_NODEFILE": "/none"})


def test_ranks_may_go_round_the_hosts():
    assert [
        (slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)
        for slot in place_ranks(["a", "b", "a", "b", "a"])
    ] == [
        *((0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2)),
        *((1, 2, 1, 2), (2, 3, 0, 1)),
    ]


def test_one_host_after_another_is_filled():
    found = fill_slots({"a": 2, "b": 3, "c": 1}, 4)
    assert "".join(slot.hostname for slot in found) == "aabb"
    assert [(slot.rank, slot.size) for slot in found] == [
        (rank, 4) for rank in range(4)
    ]
