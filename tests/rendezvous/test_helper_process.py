"""A process beside each rank sends its heartbeat, and serves the store."""

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys

import psutil
import pytest

from keras_towers import settings
from keras_towers.rendezvous.helper_process import (
    start_heartbeat,
    start_store,
    stop,
)
from keras_towers.rendezvous.liveness import State
from keras_towers.rendezvous.store import Endpoint, Progress, StoreClient
from tests.kit.processes import all_gone, wait_until

SIZE = 3
ANYWHERE = Endpoint("127.0.0.1", 0, "")
NAMES = [f"rank {rank} on h" for rank in range(SIZE)]


@pytest.fixture
def helpers(monkeypatch):
    monkeypatch.setattr(settings, "BEAT_S", 0.1)
    monkeypatch.setattr(settings, "LOST_S", 4.0)
    started = []
    yield started
    for helper in started:
        helper.kill()
        stop(helper)


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
        store.put(f"introduction-{rank}", introduction(rank))
    places = [store.get(f"placement-{rank}", 60) for rank in range(SIZE)]
    assert [place["nonce"] for place in places] == ["of 0", "of 1", "of 2"]
    assert [place["slot"]["local_rank"] for place in places] == [0, 1, 2]
    helpers.extend(start_heartbeat(endpoint, rank) for rank in (1, 2))
    assert wait_until(lambda: store.get("heartbeat-2"))

    def gone(rank=0):
        return store.report(rank, Progress(SIZE, 60))["gone"]

    # Nothing else runs in this process meanwhile.
    ctypes.PyDLL(None).usleep(5_000_000)
    assert gone() == {}
    stop(helpers[1])
    ended = {NAMES[1]: State.ENDED}
    assert wait_until(lambda: gone() == ended)
    assert gone(1) == {}
    hangs = helpers[2].pid
    os.kill(hangs, signal.SIGSTOP)
    both = {**ended, NAMES[2]: State.LOST}
    assert wait_until(lambda: gone() == both)
    # As a link does that heals.
    os.kill(hangs, signal.SIGCONT)
    assert wait_until(lambda: gone() == ended)


def test_a_port_that_is_taken_is_an_error(helpers):
    serving, taken = start_store(ANYWHERE, SIZE)
    helpers.append(serving)
    with pytest.raises(OSError, match="in use"):
        start_store(taken, SIZE)


# It starts a heartbeat and a process that keeps the heartbeat's pipe open.
KILLED = """
import os, sys, time
from keras_towers.rendezvous.helper_process import start_heartbeat
from keras_towers.rendezvous.store import Endpoint
helper = start_heartbeat(Endpoint(*eval(sys.argv[1])), 1)
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
