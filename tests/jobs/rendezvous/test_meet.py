"""Ranks find the ranks of their job; a helper beside each sends its heartbeat.

Without Horovod.
"""

import ctypes
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest

from keras_towers import TowerError
from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import launchers, meet
from keras_towers.jobs.rendezvous.liveness import TaskState
from keras_towers.jobs.rendezvous.meet import RendezvousFile
from keras_towers.jobs.rendezvous.rank_helper import (
    start_heartbeat,
    start_store,
    stop_helper,
)
from keras_towers.jobs.rendezvous.store import Endpoint, Progress, StoreClient
from tests.kit.processes import all_gone, wait_until
from tests.kit.scripts import parse_variables

pytestmark = pytest.mark.alternate

MEMBER = launchers.detect(
    parse_variables(
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1"
    )
)
ENDPOINT = Endpoint("127.0.0.1", 9, "secret")

JOIN = """
import json, os, sys, time
from keras_towers.jobs.rendezvous import meet
meet.join_job()
kept = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "GLOO_RENDEZVOUS_ADDR")
print(json.dumps([os.environ["HOROVOD_" + name] for name in kept]))
sys.stdout.flush()
while not os.path.exists(os.environ["KERAS_TOWERS_RENDEZVOUS_FOLDER"] + "/met"):
    time.sleep(0.1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(settings.ENV_RENDEZVOUS_FOLDER, str(tmp_path))
    return tmp_path / f"keras_towers-{os.getuid()}"


def test_a_rank_that_its_job_does_not_have_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv(settings.ENV_RANK, "2")
    monkeypatch.setenv(settings.ENV_SIZE, "2")
    with pytest.raises(TowerError, match="rank 2 of a job of 2 ranks") as error:
        meet.join_job()
    for words in f"set {settings.ENV_RANK} to", f"or {settings.ENV_SIZE} to":
        assert words in str(error.value)


@pytest.fixture
def start(folder, tasks):
    """Start a process that Slurm would have made a rank."""

    def start(rank, size=2, **more):
        slurm = parse_variables(
            "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1"
            f" SLURM_STEP_NUM_TASKS={size} SLURM_PROCID={rank}"
        )
        return tasks.run(sys.executable, "-c", JOIN, **slurm | more)

    return start


def test_the_file_is_private(folder):
    file = RendezvousFile(MEMBER)
    assert file.read() is None
    file.write(ENDPOINT)
    assert RendezvousFile(MEMBER).read() == ENDPOINT
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.path.chmod(0o644)
    with pytest.raises(TowerError, match="chmod go="):
        file.read()
    file.path.chmod(0o600)
    another = RendezvousFile(MEMBER)
    another.write(Endpoint("127.0.0.1", 10, "another"))
    file.remove()
    assert another.path.exists()
    another.remove()
    assert list(folder.iterdir()) == []
    file.path.symlink_to("elsewhere")
    with pytest.raises(TowerError, match="cannot be used"):
        file.read()
    folder.chmod(0o755)
    with pytest.raises(TowerError, match="chmod go="):
        RendezvousFile(MEMBER)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            "RENDEZVOUS_FOLDER=/proc/none",
            "RENDEZVOUS_FOLDER to a folder that all",
        ),
        ("RENDEZVOUS=host", "give host:port"),
        ("RENDEZVOUS=host:0", "give host:port"),
        ("RENDEZVOUS=host:9", "KERAS_TOWERS_SECRET"),
    ],
)
def test_what_the_user_has_set(monkeypatch, environment, said):
    monkeypatch.setenv("KERAS_TOWERS_SECRET", "short")
    for name, value in parse_variables(environment).items():
        monkeypatch.setenv(f"KERAS_TOWERS_{name}", value)
    with pytest.raises(TowerError, match=said):
        meet.given_endpoint()
        RendezvousFile(MEMBER)


def test_ranks_meet_in_spite_of_an_earlier_job(start, folder):
    """It was killed, so that its file is still there."""
    killed = start(0)
    assert wait_until(lambda: list(folder.glob("srun*")))
    killed.kill()
    second = start(1)
    time.sleep(1)
    ranks = [start(0), second]
    for rank in ranks:
        rank.wait_for("]\n")
    # The other one needs rank 0 until it has met.
    (folder.parent / "met").touch()
    assert [rank.finish().code for rank in ranks] == [0, 0], ranks[0].output
    first, second = (json.loads(rank.out) for rank in ranks)
    assert first[:4] == ["0", "2", "0", "2"]
    assert second[:4] == ["1", "2", "1", "2"]
    assert first[4] == second[4]
    assert first[4].startswith("127.0.0.1:")
    assert list(folder.iterdir()) == []


def test_ranks_that_have_not_arrived_are_named(start):
    limit = {"KERAS_TOWERS_RENDEZVOUS_TIMEOUT": "6"}
    of_three = {start(rank, 3, **limit): "rank 2 has not" for rank in (0, 1)}
    alone = {start(1, 2, **limit, SLURM_STEP_ID="1"): "waited 6 s for rank 0"}
    for process, said in (of_three | alone).items():
        assert process.finish().code == 1
        assert said in process.err


SIZE = 3
ANYWHERE = Endpoint("127.0.0.1", 0, "")
NAMES = [f"rank {rank} on h" for rank in range(SIZE)]


@pytest.fixture
def helpers(monkeypatch):
    monkeypatch.setattr(settings, "BEAT_S", 0.1)
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(settings, "LOST_S", 4.0)
    started = []
    yield started
    for helper in started:
        helper.kill()
        stop_helper(helper)


def introduction(rank):
    return {
        "host": "h",
        "name": "h",
        "address": "127.0.0.1",
        "cores": [0],
        "nonce": f"of {rank}",
    }


def test_only_ranks_that_end_or_hang_are_gone(helpers):
    serving, endpoint = start_store(ANYWHERE, SIZE)
    helpers.append(serving)
    store = StoreClient(endpoint)
    assert endpoint.port and len(endpoint.secret) > 16
    for rank in range(SIZE):
        assert store.get("placement-0") is None
        missing, _ = store.give("introductions", rank, SIZE, introduction(rank))
    assert not missing.number
    places = [store.get(f"placement-{rank}", 60) for rank in range(SIZE)]
    assert [place["nonce"] for place in places] == ["of 0", "of 1", "of 2"]
    assert [place["slot"]["local_rank"] for place in places] == [0, 1, 2]
    helpers.extend(start_heartbeat(endpoint, rank, SIZE) for rank in (1, 2))
    assert wait_until(lambda: store.get("heartbeat-2"))

    def gone(rank=0):
        return store.report(rank, Progress(SIZE, 60))["gone"]

    # Nothing else runs in this process meanwhile.
    ctypes.PyDLL(None).usleep(5_000_000)
    assert gone() == {}
    stop_helper(helpers[1])
    ended = {NAMES[1]: TaskState.ENDED}
    assert wait_until(lambda: gone() == ended)
    assert gone(1) == {}
    hangs = helpers[2].pid
    os.kill(hangs, signal.SIGSTOP)
    both = {**ended, NAMES[2]: TaskState.LOST}
    assert wait_until(lambda: gone() == both)
    # As a link does that heals.
    os.kill(hangs, signal.SIGCONT)
    assert wait_until(lambda: gone() == ended)


# It meets no other rank, and serves their store or sends its heartbeat.
FROZEN = """
import sys, time
from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import rank_helper
from keras_towers.jobs.rendezvous.store import Endpoint
settings.BEAT_S = settings.HEARTBEAT_S = 0.2
settings.LOST_S = 4.0
rank, place = eval(sys.argv[1])
if rank:
    rank_helper.start_heartbeat(Endpoint(*place), rank, 2)
else:
    _, endpoint = rank_helper.start_store(Endpoint(*place), 2)
    print(repr((endpoint.address, endpoint.port, endpoint.secret)), flush=True)
time.sleep(60)
"""


def test_a_rank_that_is_stopped_is_lost(tmp_path):
    """Although the process beside it goes on."""

    def start(rank, place):
        command = [sys.executable, "-c", FROZEN, repr((rank, place))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start(0, dataclasses.astuple(ANYWHERE)) as first:
        endpoint = Endpoint(*eval(first.stdout.readline()))
        store = StoreClient(endpoint)
        for rank in range(2):
            store.give("introductions", rank, 2, introduction(rank))
        with start(1, dataclasses.astuple(endpoint)) as second:
            try:
                assert wait_until(lambda: store.get("heartbeat-1"))

                def gone():
                    return store.report(2, Progress(2, 60))["gone"]

                assert wait_until(lambda: gone() == {})
                # Looked at, they are nearly always stopped, but run at times.
                for _ in range(50):
                    for rank in first, second:
                        rank.send_signal(signal.SIGSTOP)
                    time.sleep(0.1)
                    for rank in first, second:
                        rank.send_signal(signal.SIGCONT)
                    assert gone() == {}
                lost = dict.fromkeys(NAMES[:2], TaskState.LOST)
                first.send_signal(signal.SIGSTOP)
                second.send_signal(signal.SIGSTOP)
                assert wait_until(lambda: gone() == lost)
                first.send_signal(signal.SIGCONT)
                second.send_signal(signal.SIGCONT)
                assert wait_until(lambda: gone() == {})
            finally:
                second.kill()
                first.kill()


def test_a_port_that_is_taken_is_an_error(helpers):
    serving, taken = start_store(ANYWHERE, SIZE)
    helpers.append(serving)
    with pytest.raises(OSError, match="in use"):
        start_store(taken, SIZE)


# It starts a heartbeat and a process that keeps the heartbeat's pipe open.
KILLED = """
import os, sys, time
from keras_towers.jobs.rendezvous.rank_helper import start_heartbeat
from keras_towers.jobs.rendezvous.store import Endpoint
helper = start_heartbeat(Endpoint(*eval(sys.argv[1])), 1, 2)
child = os.fork() or time.sleep(60) or os._exit(0)
print(helper.pid, child, flush=True)
time.sleep(60)
"""


def test_a_heartbeat_does_not_outlive_its_rank(helpers):
    """Even if a child of the rank does, with all files of the rank."""
    serving, endpoint = start_store(ANYWHERE, SIZE)
    helpers.append(serving)
    place = repr(dataclasses.astuple(endpoint))
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, place], stdout=subprocess.PIPE, text=True
    ) as rank:
        beating, child = map(int, rank.stdout.readline().split())
        helper = psutil.Process(beating)
        rank.kill()
        try:
            assert all_gone([helper])
        finally:
            os.kill(child, signal.SIGKILL)
