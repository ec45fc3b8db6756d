"""Jobs whose ranks use Horovod, and how its elastic driver ends."""

import urllib.error
import urllib.request

import psutil
import pytest

from keras_towers import settings
from keras_towers.rendezvous import store
from tests.kit.processes import all_gone
from tests.kit.sampling import on_some_days
from tests.kit.scripts import write_executable

JOB = """
import os, time
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
for step in range(10_000):
    total = float(hvd.allreduce(tf.ones(()), op=hvd.Sum, name="x"))
    assert total == hvd.size()
    if step == 3:
        with open("ready", "a") as file:
            print(hvd.rank(), os.getpid(), file=file)
    time.sleep(0.05)
"""


def listening(process):
    return {
        connection.laddr
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def is_refused(port):
    """Whether the job's store does not take what a stranger writes."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/keras_towers/hosts_updated",
        data=b"[9e9, 1]",
        method="PUT",
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked, timeout=60)
    return True


@pytest.mark.slow
def test_strangers_find_loopback_and_no_secret_and_a_killed_rank_ends_all(
    launch, tmp_path
):
    # A proxy that must not be used.
    job = launch("-np 2", JOB, http_proxy="http://127.0.0.1:9")
    ready = job.wait_for("\n", tmp_path / "ready", times=2)
    pids = dict(line.split() for line in ready.splitlines())
    ranks = [psutil.Process(int(pids[rank])) for rank in "01"]
    launcher, family = psutil.Process(job.process.pid), job.family()
    everyone = [launcher, *family]
    places = [place for one in everyone for place in listening(one)]
    assert {place.ip for place in places} == {"127.0.0.1"}
    ((_, port),) = listening(launcher)
    assert is_refused(port)
    environments = [process.environ() for process in everyone]
    name = settings.ENV_SECRET
    (secret,) = {e[name] for e in environments if name in e}
    for process in everyone:
        line = " ".join(process.cmdline())
        assert secret not in line and store.path_token(secret) not in line
    ranks[1].kill()
    done = job.finish()
    assert done.code == 137
    assert "rank 1 was killed by SIGKILL" in done.last
    assert all_gone(family)


def test_killed_workers_of_an_elastic_job(run):
    done = run("--min-np 2", "import os; os.kill(os.getpid(), 9)")
    assert done.code == 137, done.err
    assert done.last.startswith("keras-towers run: worker ")
    assert "was killed by SIGKILL" in done.last
    assert "no worker is left that has the training's state" in done.last


# Whoever joins rank 0 is killed.
KILLS = """
import os, time
import tensorflow as tf
from keras_towers import horovod as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    print("of", hvd.size(), flush=True)
    hvd.allreduce(tf.ones(()), name="x")
    while True:
        if hvd.rank() == 1:
            os.kill(os.getpid(), 9)
        hvd.allreduce(tf.ones(()), name="y")
        time.sleep(0.1)
        state.commit()

train(hvd.elastic.ObjectState())
"""


@on_some_days()
@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_on_the_only_host(
    run, tmp_path
):
    write_executable(tmp_path / "hosts.sh", "echo localhost:2")
    options = (
        "--min-np 1 --reset-limit 2 --blacklist-cooldown-range 1 1 "
        "--host-discovery-script ./hosts.sh"
    )
    done = run(options, KILLS)
    assert done.code == 1, done.out + done.err
    # The first one does not end the job, nor the one beside it.
    sizes = [line.split()[-1] for line in done.out.splitlines() if "of" in line]
    assert sizes == ["2", "2", "1", "2", "2"]
    assert done.err.count("was killed by SIGKILL") == 2
    assert "no worker on 127.0.0.2 for 1 s, as one has failed there" in done.err
    assert "over 2 times (--reset-limit)" in done.last


def test_too_few_slots_are_named_and_waited_for(run, tmp_path):
    write_executable(tmp_path / "hosts.sh", "echo localhost")
    options = "--min-np 2 --elastic-timeout 2 --host-discovery-script"
    done = run(f"{options} ./hosts.sh", "")
    assert done.code == 2
    waits, ends = done.err.strip().splitlines()
    assert "slots for workers: 1, --min-np asks for 2; waiting" in waits
    assert "there were not 2 slots within 2 s: add hosts" in ends


# Until there are three again.
GROWS = """
import time
import tensorflow as tf
from keras_towers import horovod as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    while not (state.shrunk and hvd.size() == 3):
        hvd.allreduce(tf.ones(()), name="x")
        if hvd.rank() == 0:
            open("sizes", "a").write(f"{hvd.size()}\\n")
        state.shrunk = state.shrunk or hvd.size() == 2
        time.sleep(0.1)
        state.commit()

train(hvd.elastic.ObjectState(shrunk=False))
print("done")
"""


@pytest.mark.long
def test_hosts_that_go_and_come(launch, tmp_path):
    hosts, sizes = tmp_path / "hosts", tmp_path / "sizes"
    hosts.write_text("127.0.0.1:2\n127.0.0.2:1\n")
    write_executable(tmp_path / "hosts.sh", "cat hosts")
    options = "--min-np 2 --max-np 3 --host-discovery-script ./hosts.sh"
    job = launch(options, GROWS)
    job.wait_for("3\n", sizes)
    hosts.write_text("127.0.0.1:2\n")
    job.wait_for("2\n", sizes)
    hosts.write_text("127.0.0.1:2\n127.0.0.3:1\n")
    done = job.finish()
    assert done.code == 0, done.out + done.err
    assert done.out.count("done") == 3
    assert "worker 2 leaves, as its host has" in done.err
