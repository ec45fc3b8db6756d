"""Heartbeats that a process beside each rank sends."""

import ctypes
import os
import signal

import pytest

from keras_towers import settings
from keras_towers.rendezvous.heartbeat import HeartbeatProcess
from keras_towers.rendezvous.liveness import State
from keras_towers.rendezvous.store import Endpoint
from keras_towers.rendezvous.watch import GONE
from tests.launching.jobs import wait_until

RANKS = 3


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.setattr(settings, "BEAT_S", 0.1)
    monkeypatch.setattr(settings, "LOST_S", 4.0)
    found = [HeartbeatProcess() for _ in range(RANKS)]
    yield found
    for process in found:
        process._process.kill()
        process.stop()


def test_who_ends_and_who_hangs_is_lost_and_nobody_else(beside):
    endpoint = beside[0].serve(Endpoint("127.0.0.1", 0, ""))
    store = endpoint.client()
    assert endpoint.port and len(endpoint.secret) > 16
    names = [f"rank {rank} on h" for rank in range(RANKS)]
    beside[0].begin(["h"] * RANKS, names)
    for rank, process in enumerate(beside):
        process.beat(endpoint, rank)
    assert wait_until(lambda: store.get("heartbeat-2"))
    # Nothing else runs in this process meanwhile.
    ctypes.PyDLL(None).usleep(5_000_000)
    assert store.get(GONE) == {}
    beside[1].stop()
    ended = {"1": [names[1], State.ENDED]}
    assert wait_until(lambda: store.get(GONE) == ended)
    hangs = beside[2]._process.pid
    os.kill(hangs, signal.SIGSTOP)
    both = {**ended, "2": [names[2], State.LOST]}
    assert wait_until(lambda: store.get(GONE) == both)
    # As a link does that heals.
    os.kill(hangs, signal.SIGCONT)
    assert wait_until(lambda: store.get(GONE) == ended)


def test_where_nobody_can_listen(beside):
    taken = beside[0].serve(Endpoint("127.0.0.1", 0, ""))
    with pytest.raises(OSError, match="in use"):
        beside[1].serve(Endpoint("127.0.0.1", taken.port, ""))
    assert beside[1].serve(Endpoint("127.0.0.1", 0, "")).port
