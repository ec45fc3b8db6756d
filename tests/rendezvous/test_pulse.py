"""Signs of life that come from a process beside each rank."""

import ctypes
import os
import signal

import pytest

from keras_towers import settings
from keras_towers.rendezvous import watch
from keras_towers.rendezvous.pulse import Pulse
from keras_towers.rendezvous.store import Endpoint
from tests.launching.jobs import wait_until

RANKS = 3


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.setattr(settings, "BEAT_S", 0.1)
    monkeypatch.setattr(settings, "LOST_S", 4.0)
    found = [Pulse() for _ in range(RANKS)]
    yield found
    for pulse in found:
        pulse._process.kill()
        pulse.stop()


def test_who_ends_and_who_hangs_is_lost_and_nobody_else(beside):
    endpoint = beside[0].serve(Endpoint("127.0.0.1", 0, ""))
    store = endpoint.client()
    assert endpoint.port and len(endpoint.secret) > 16
    names = [f"rank {rank} on h" for rank in range(RANKS)]
    beside[0].begin(["h"] * RANKS, names)
    for rank, pulse in enumerate(beside):
        pulse.beat(endpoint, rank)
    assert wait_until(lambda: store.get("pulse-2"))
    # Nothing else runs in this process meanwhile.
    ctypes.PyDLL(None).usleep(5_000_000)
    assert store.get(watch.LOST) == {}
    beside[1].stop()
    ended = {"1": [names[1], watch.ENDED]}
    assert wait_until(lambda: store.get(watch.LOST) == ended)
    hangs = beside[2]._process.pid
    os.kill(hangs, signal.SIGSTOP)
    both = {**ended, "2": [names[2], watch.SILENT]}
    assert wait_until(lambda: store.get(watch.LOST) == both)
    # As a link does that heals.
    os.kill(hangs, signal.SIGCONT)
    assert wait_until(lambda: store.get(watch.LOST) == ended)


def test_where_nobody_can_listen(beside):
    taken = beside[0].serve(Endpoint("127.0.0.1", 0, ""))
    with pytest.raises(OSError, match="in use"):
        beside[1].serve(Endpoint("127.0.0.1", taken.port, ""))
    assert beside[1].serve(Endpoint("127.0.0.1", 0, "")).port
