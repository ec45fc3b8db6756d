"""Jobs that the launcher starts by ssh, and what ends them."""

import pytest

from tests.cluster.jobs import NEEDS_HOSTS, NOTICED_S, STEPS, launched
from tests.cluster.lab import Lab
from tests.processes import started

pytestmark = NEEDS_HOSTS


@pytest.fixture
def lab():
    with Lab(3, ssh=True) as hosts:
        yield hosts


def test_weights_are_those_of_one_process(lab):
    folder = str(lab.shared)
    job = launched(
        lab, f"-np 2 -m tests.processes.started {folder} HorovodStrategy"
    )
    assert job.finish(200).code == 0, job.output
    started.assert_as_one_process(lab.shared)


def test_more_slots_than_logins_that_a_host_allows_at_once(lab):
    job = launched(lab, "-np 24 -H host2:24 -m platform")
    assert job.finish(200).code == 0, job.output
    ranks = [line.split()[0] for line in job.lines if line.startswith("[")]
    assert sorted(ranks) == sorted(f"[{rank}]" for rank in range(24))


def test_a_host_that_is_cut_ends_a_job_of_horovod_and_is_named(lab):
    job = launched(lab, "-np 2", "HorovodStrategy")
    job.says(STEPS)
    lab.hosts[2].cut()
    assert job.finish(NOTICED_S).code > 0
    assert "host3" in job.lines[-1], job.output
