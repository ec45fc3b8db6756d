"""Jobs whose ranks use Horovod."""

import os
import re
import signal
import time

import psutil
import pytest

from tests.launching.jobs import Launched, all_gone

JOB = """
import os, sys, time
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
for step in range(10_000):
    total = float(hvd.allreduce(tf.ones(()), op=hvd.Sum, name="x"))
    assert total == hvd.size()
    if step == 3:
        with open("ready", "a") as file:
            print(hvd.rank(), os.getpid(), file=file)
        if hvd.rank() == 1 and "raise" in sys.argv:
            raise ValueError("bad data")
    time.sleep(0.05)
"""

ELASTIC = """
import os, time
import horovod.tensorflow as hvd, tensorflow as tf
import horovod.tensorflow.elastic as elastic
from horovod.common.elastic import ObjectState
hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)

@elastic.run
def train(state):
    while state.step < 400 and not os.path.exists("enough"):
        hvd.allreduce(tf.ones(()), op=hvd.Sum, name="x")
        state.step += 1
        if state.step % 5 == 0:
            with open("ready", "a") as file:
                print(os.environ["HOROVOD_HOSTNAME"], os.getpid(),
                      hvd.size(), state.step, file=file)
            state.commit()
        time.sleep(0.05)

train(state)
"""


@pytest.fixture
def launch(tmp_path):
    running = []

    def launch(script, *arguments):
        (tmp_path / "script.py").write_text(script)
        running.append(Launched(tmp_path, arguments))
        return running[-1]

    yield launch
    for job in running:
        if job.process.poll() is None:
            job.finish(0)


def test_a_rank_that_ends_before_it_connects_is_named(launch):
    script = "import os\nif os.environ['HOROVOD_RANK'] == '0':" + "".join(
        f"\n    {line}" for line in JOB.strip().splitlines()
    )
    done = launch(script, "-np", "2", "script.py").finish(60)
    assert done.code == 1
    assert done.last == (
        "keras-towers run: rank 1 ended with exit code 0 before it connected, "
        "and rank 0 waits for it"
    )


def test_killed_rank_ends_the_job_and_all_is_on_loopback(launch, tmp_path):
    job = launch(JOB, "-np", "2", "script.py")
    ready = job.wait_for(tmp_path / "ready", lines=2)
    family = job.family()
    listening = {
        connection.laddr.ip
        for process in [psutil.Process(job.process.pid), *family]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    pids = dict(line.split() for line in ready.splitlines())
    killed = time.monotonic()
    os.kill(int(pids["1"]), signal.SIGKILL)
    done = job.finish(40)
    assert time.monotonic() - killed < 30
    assert done.code == 137
    assert "rank 1 was killed by SIGKILL" in done.last
    assert all_gone(family, 0.5)


def test_exception_is_told_from_its_consequences(launch):
    done = launch(JOB, "-np", "2", "script.py", "raise").finish(60)
    assert done.code == 1
    assert "[1] ValueError: bad data" in done.err
    assert "rank 1 ended with exit code 1; its last lines" in done.last


@pytest.mark.slow
@pytest.mark.long
def test_elastic_job_goes_on_without_a_killed_worker(launch, tmp_path):
    (tmp_path / "hosts.sh").write_text(
        "#!/bin/sh\necho localhost:1; echo 127.0.0.2:2\n"
    )
    (tmp_path / "hosts.sh").chmod(0o755)
    job = launch(
        ELASTIC,
        *("--min-np", "2", "--max-np", "3", "-np", "3"),
        *("--blacklist-cooldown-range", "600", "3600"),
        *("--host-discovery-script", "./hosts.sh", "script.py"),
    )
    ready = job.wait_for(tmp_path / "ready", lines=9)
    pid = next(
        int(line.split()[1])
        for line in ready.splitlines()
        if line.startswith("localhost ")
    )
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while not re.search(" 2 [0-9]+\n", (tmp_path / "ready").read_text()):
        assert time.monotonic() - killed < 40
        time.sleep(0.1)
    (tmp_path / "enough").touch()
    done = job.finish(40)
    assert done.code == 0, done.err
    assert "was killed by SIGKILL" in done.err
    steps = [
        int(line.split()[3])
        for line in (tmp_path / "ready").read_text().splitlines()
        if line.split()[2] == "2"
    ]
    # From where it was, not from the beginning.
    assert min(steps) > 5


def hosts_script(folder, *hosts):
    path = folder / "hosts.sh"
    lines = "".join(f"echo {host}; " for host in hosts)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return "--host-discovery-script", "./hosts.sh"


def test_too_few_slots_are_named_and_waited_for(launch, tmp_path):
    options = hosts_script(tmp_path, "localhost")
    job = launch(
        *("", "--min-np", "2", "--elastic-timeout", "2"),
        *(*options, "script.py"),
    )
    done = job.finish(30)
    assert done.code == 2
    waits, ends = done.err.strip().splitlines()
    assert "slots for workers: 1, --min-np asks for 2; waiting" in waits
    assert "there were not 2 slots within 2 s: add hosts" in ends


@pytest.mark.slow
def test_falling_below_the_least_is_said(launch, tmp_path):
    options = hosts_script(tmp_path, "localhost", "127.0.0.2")
    job = launch(
        *(ELASTIC, "--min-np", "2", "--elastic-timeout", "3"),
        *("--blacklist-cooldown-range", "600", "3600"),
        *(*options, "script.py"),
    )
    ready = job.wait_for(tmp_path / "ready", lines=4).splitlines()
    pid = next(int(line.split()[1]) for line in ready if line[:3] == "127")
    os.kill(pid, signal.SIGKILL)
    done = job.finish(60)
    assert done.code == 1
    said = [line for line in done.err.splitlines() if "towers run:" in line]
    for line, words in zip(
        said,
        [
            "was killed by SIGKILL",
            "slots for workers: 1, --min-np asks for 2; waiting for more",
            "there were not 2 slots within 3 s: add hosts",
        ],
        strict=True,
    ):
        assert words in line
