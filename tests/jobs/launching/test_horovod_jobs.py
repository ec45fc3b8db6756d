"""Jobs whose ranks use Horovod, also those whose hosts come and go."""

import itertools
import urllib.error
import urllib.request

import psutil
import pytest

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous.signatures import path_token
from tests.kit.processes import all_gone
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.alternate

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
        f"http://127.0.0.1:{port}/keras_towers/committed",
        data=b'["backup", 1]',
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
        assert secret not in line and path_token(secret) not in line
    ranks[1].kill()
    done = job.finish()
    assert done.code == 137
    assert "rank 1 was killed by SIGKILL" in done.last
    assert all_gone(family)


def test_an_elastic_job_without_progress_ends(run):
    done = run("--min-np 1 -np 2", "import os; os.kill(os.getpid(), 9)")
    assert done.code == 137, done.err
    assert done.err.count("starting all processes again, from the begin") == 2
    assert "lost 3 times without a backup in between" in done.last
    # The first time, nobody is to blame but the process.
    assert done.err.count("no rank starts on localhost for 5 s") == 1


# A script as for Horovod's own elastic jobs. Rank 1 is killed once.
HOROVODS = """
import os
import time
import tensorflow as tf
from keras_towers import horovod as hvd
hvd.init()
total = tf.Variable(0.0)
resets = []

@hvd.elastic.run
def train(state):
    assert float(total) == state.step
    while state.step < 1000 and not state.done:
        if hvd.rank() == 0:
            open("sizes", "a").write(f"{state.step} {hvd.size()}\\n")
        total.assign_add(hvd.allreduce(tf.ones(()), name="x"))
        state.step += 1
        time.sleep(0.1)
        state.commit()
        if hvd.rank() == 1 and hvd.size() == 2 and state.killed == 0:
            state.killed = 1
        elif hvd.rank() == 1 and state.killed and not os.path.exists("killed"):
            open("killed", "w").write("yes")
            os.kill(os.getpid(), 9)
        state.done = hvd.size() == 3 and os.path.exists("killed")
    print("done after", len(resets), "resets", flush=True)

state = hvd.elastic.TensorFlowState([total], step=0, killed=0, done=False)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
"""


@pytest.mark.alternate(turn=5)
@pytest.mark.slow
def test_a_script_for_horovods_elastic_jobs(launch, tmp_path):
    """Its hosts go and come, and one of its ranks is killed."""
    hosts, sizes = tmp_path / "hosts", tmp_path / "sizes"
    hosts.write_text("127.0.0.1:3\n")
    write_executable(tmp_path / "hosts.sh", "cat hosts")
    options = "--min-np 2 --max-np 3 --host-discovery-script ./hosts.sh"
    job = launch(options, HOROVODS)
    job.wait_for(" 3\n", sizes)
    hosts.write_text("127.0.0.1:2\n")
    job.wait_for(" 2\n", sizes)
    job.wait_for("yes", tmp_path / "killed")
    hosts.write_text("127.0.0.1:2\nlocalhost:1\n")
    done = job.finish(200)
    assert done.code == 0, done.out + done.err
    # A process knows of its own start only.
    assert done.out.count("done after 1 resets") == 3
    # The launcher may see the new slot before the kill.
    if done.err.count("hosts have come or gone") != 2:
        assert done.err.count("hosts have come or gone") == 1
        assert "rank 1 was killed by SIGKILL" in done.err
    # No step is done twice, but for those after a commit that nobody awaited.
    steps = [int(line.split()[0]) for line in sizes.read_text().splitlines()]
    again = [other - one for one, other in itertools.pairwise(steps)]
    assert set(again) <= {1, 0}
    assert again.count(0) <= 1
    # The job's own commits are gone with it.
    assert not [*tmp_path.glob(".keras-towers-*")]


def test_too_few_slots_are_named_and_waited_for(run, tmp_path):
    write_executable(tmp_path / "hosts.sh", "echo localhost")
    options = "--min-np 2 --elastic-timeout 2 --host-discovery-script"
    done = run(f"{options} ./hosts.sh", "")
    assert done.code == 2
    waits, ends = done.err.strip().splitlines()
    assert "found 1 of the 2 slots that --min-np asks for: waiting" in waits
    assert "found fewer than 2 slots in 2 s: add hosts" in ends
