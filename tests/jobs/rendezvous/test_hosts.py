"""Hosts that are named or allocated, and the ranks in their slots."""

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import hosts
from keras_towers.jobs.rendezvous.hosts import (
    allocation,
    fill_slots,
    place_ranks,
)
from tests.kit.scripts import parse_variables

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not ''"),
        ("a:1:2", "not 'a:1:2'"),
        ("a:0", "the host a needs at least one slot"),
        ("a:1,a:2", "the host a is given twice"),
        ("a;rm -rf:1", "not 'a;rm -rf:1'"),
    ],
)
def test_an_invalid_host_is_named(text, said):
    with pytest.raises(TowerError, match=said):
        hosts.parse_hosts(text)


def test_hosts_and_their_slots(tmp_path):
    found = hosts.parse_hosts("a:2, b-1.net:1,c")
    assert found == {"a": 2, "b-1.net": 1, "c": 1}
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb:3  # old\nc\n")
    assert hosts.parse_hostfile(path) == {"a": 2, "b": 3, "c": 1}
    for text, said in (("# none\n", "no host was"), ("a slots\n", "'a slots'")):
        path.write_text(text)
        with pytest.raises(TowerError, match=f"hostfile .*{said}"):
            hosts.parse_hostfile(path)


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
    ("environment", "text", "manager", "hosts"),
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
        ("LSB_DJOB_HOSTFILE=hosts", "a\nb\nb\n", "LSF", {"a": 1, "b": 2}),
        (
            "OMPI_MCA_orte_default_hostfile=hosts",
            *("w-0.svc slots=2\nw-1 slots=1\n", MPI_OPERATOR),
            {"w-0.svc": 2, "w-1": 1},
        ),
        ("I_MPI_HYDRA_HOST_FILE=hosts", "w-0:3\n", MPI_OPERATOR, {"w-0": 3}),
    ],
)
def test_allocation(tmp_path, monkeypatch, environment, text, manager, hosts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(text)
    found = allocation(parse_variables(environment))
    assert found == (manager, hosts)


def test_allocation_without_a_file():
    assert allocation({}) is None
    with pytest.raises(TowerError, match="list of this job's hosts"):
        allocation({"PBS_NODEFILE": "/none"})


def test_ranks_may_alternate_between_hosts():
    assert [
        (slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)
        for slot in place_ranks(["a", "b", "a", "b", "a"])
    ] == [
        *((0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2)),
        *((1, 2, 1, 2), (2, 3, 0, 1)),
    ]


def test_hosts_are_filled_in_order():
    found = fill_slots({"a": 2, "b": 3, "c": 1}, 4)
    assert "".join(slot.hostname for slot in found) == "aabb"
    assert [(slot.rank, slot.size) for slot in found] == [
        (rank, 4) for rank in range(4)
    ]
