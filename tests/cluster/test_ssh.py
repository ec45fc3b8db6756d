"""Jobs that the launcher starts by ssh, and what ends them."""

import subprocess
import sys
import time

import pytest

from tests.cluster.lab import Lab, why_not
from tests.processes import started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        why_not(ssh=True) is not None, reason=str(why_not(True))
    ),
]
# Whoever is gone is named within this.
NOTICED_S = 60


@pytest.fixture
def lab():
    with Lab(3, ssh=True) as hosts:
        yield hosts


def launch(host, *arguments):
    """The launcher on a host."""
    return host.start(
        [sys.executable, "-m", "keras_towers", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    "kind", ["HorovodStrategy", "MultiWorkerTowerStrategy"]
)
def test_weights_are_those_of_one_process(lab, kind):
    folder = lab.shared / kind
    folder.mkdir()
    runtime = (
        () if kind == "HorovodStrategy" else ("--strategy", "multi-worker")
    )
    job = launch(
        lab.hosts[0],
        "-H",
        "host2,host3",
        *runtime,
        *("-m", "tests.processes.started", str(folder), kind),
    )
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    started.assert_as_one_process(folder)


@pytest.mark.parametrize("strategy", ["horovod", "multi-worker"])
def test_a_host_that_is_cut_ends_the_job_and_is_named(lab, strategy):
    job = launch(
        lab.hosts[0],
        "-H",
        "host2,host3",
        "--strategy",
        strategy,
        *("-m", "tests.cluster.endless"),
    )
    assert job.stdout is not None
    for line in job.stdout:
        if "steps" in line:
            break
    lab.hosts[2].cut()
    before = time.monotonic()
    _, err = job.communicate(timeout=NOTICED_S * 2)
    assert time.monotonic() - before < NOTICED_S
    assert job.returncode not in (0, None)
    assert "host3" in err.splitlines()[-1], err
