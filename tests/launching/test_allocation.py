"""The hosts that managers of clusters give."""

import pytest

from keras_towers import TowerError
from keras_towers.launching.allocation import allocation, expand_nodes

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("gpu1,n[01-02,07]", ["gpu1", "n01", "n02", "n07"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[5,7].x", ["r1n5.x", "r1n7.x", "r2n5.x", "r2n7.x"]),
        ("10.0.0.1", ["10.0.0.1"]),
    ],
)
def test_nodes(text, names):

    assert expand_nodes(text) == names


def test_slurm():
    job = {
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
        "SLURMD_NODENAME": "n1",
    }
    found = allocation(job)
    assert found.manager == "Slurm"
    assert found.hosts == {"localhost": 2, "n2": 2, "n3": 1}
    step = job | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n2",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "n2",
    }
    assert allocation(step).hosts == {"localhost": 1}
    assert allocation(step | {"SLURM_STEP_ID": "4294967290"}).hosts == {
        **{"n1": 2, "localhost": 2, "n3": 1}
    }


@pytest.mark.parametrize(
    ("name", "manager", "text", "hosts"),
    [
        ("PBS_NODEFILE", "PBS", "a\na\nb.x\n", {"a": 2, "b.x": 1}),
        ("LSB_DJOB_HOSTFILE", "LSF", "a\nb\nb\n", {"a": 1, "b": 2}),
        (
            "OMPI_MCA_orte_default_hostfile",
            "the MPI Operator",
            "w-0.pi.ns.svc slots=2\nw-1.pi.ns.svc slots=2\n",
            {"w-0.pi.ns.svc": 2, "w-1.pi.ns.svc": 2},
        ),
        ("I_MPI_HYDRA_HOST_FILE", "the MPI Operator", "w-0:3\n", {"w-0": 3}),
    ],
)
def test_files(tmp_path, name, manager, text, hosts):
    file = tmp_path / "hosts"
    file.write_text(text)
    found = allocation({name: str(file)})
    assert (found.manager, found.hosts) == (manager, hosts)


def test_lsf_without_a_file():
    assert allocation({"LSB_MCPU_HOSTS": "a 4 b 2"}).hosts == {"a": 4, "b": 2}


def test_none_or_not_readable(tmp_path):
    assert allocation({}) is None
    with pytest.raises(TowerError, match="list of this job's hosts"):
        allocation({"PBS_NODEFILE": str(tmp_path / "none")})
