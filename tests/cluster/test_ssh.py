"""Jobs that the launcher starts by ssh, and what ends them."""

import subprocess
import sys
import time

import pytest

from tests.cluster.lab import Lab, why_not
from tests.processes import started

REASON = why_not(ssh=True)
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
HOSTS = ("-H", "host2,host3")
# Whoever is gone is named within this.
NOTICED_S = 60


@pytest.fixture
def lab():
    with Lab(3, ssh=True) as hosts:
        yield hosts


def launch(host, *arguments):
    """The launcher on a host."""
    return host.start(
        [sys.executable, "-m", "keras_towers", "run", *HOSTS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_weights_are_those_of_one_process(lab):
    folder = str(lab.shared)
    module = ("-m", "tests.processes.started", folder, "HorovodStrategy")
    job = launch(lab.hosts[0], "-np", "2", *module)
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    started.assert_as_one_process(lab.shared)


def test_more_slots_than_logins_that_a_host_allows_at_once(lab):
    slots = ("-np", "24", "-H", "host2:24", "-m", "platform")
    job = lab.hosts[0].start(
        [sys.executable, "-m", "keras_towers", "run", *slots],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert sorted(line.split()[0] for line in out.splitlines()) == sorted(
        f"[{rank}]" for rank in range(24)
    )


def goes_on_until_cut(job, host):
    """A job that trains, until a host is cut; its last words."""
    assert any("steps" in line for line in job.stdout), job.communicate()[1]
    host.cut()
    before = time.monotonic()
    _, err = job.communicate(timeout=NOTICED_S * 2)
    assert time.monotonic() - before < NOTICED_S
    assert job.returncode not in (0, None)
    return err


def test_a_host_that_is_cut_ends_a_job_of_horovod_and_is_named(lab):
    module = ("-m", "tests.cluster.endless", "HorovodStrategy")
    job = launch(lab.hosts[0], "-np", "2", *module)
    err = goes_on_until_cut(job, lab.hosts[2])
    assert "host3" in err.splitlines()[-1], err
