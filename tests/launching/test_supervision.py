"""Whose fault it is that a job has failed."""

import contextlib
import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from keras_towers.launching.elastic import Driver, Elastic
from keras_towers.launching.supervision import blame, describe
from keras_towers.meeting.hosts import slots
from keras_towers.meeting.server import LISTENERS_SCOPE
from tests.launching.jobs import wait_until

pytestmark = pytest.mark.core

SHUT_DOWN = "UnknownError: Horovod has been shut down. This was caused by"
LOST = "Gloo: Read error [127.0.0.1]: Connection reset by peer"


def ended(code, text="", name="0"):
    return SimpleNamespace(code=code, tail=lambda: text, name=name, host=None)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0,), (0,)], None),
        ([(0,), (3,)], (1, True)),
        ([(1, "ValueError"), (1, SHUT_DOWN)], (0, True)),
        # The rank that raised is the last one to be gone.
        ([(1, SHUT_DOWN), (1, "ValueError")], (1, True)),
        ([(1, LOST), (137,)], (1, True)),
        ([(1, LOST), (134, LOST), (9,)], (2, True)),
        ([(1, SHUT_DOWN), (0,)], (0, False)),
    ],
)
def test_the_first_that_failed_by_itself(ends, expected):
    ranks = [ended(*end) for end in ends]
    found = blame(ranks)
    assert (found and (ranks.index(found[0]), found[1])) == expected


@pytest.mark.parametrize(
    ("code", "host", "shown", "said"),
    [
        # Others are in jobs.
        (137, None, True, "rank 1 was killed by SIGKILL (out of memory?)"),
        (139, None, True, "rank 1 was killed by SIGSEGV"),
        (200, None, False, "rank 1 ended with exit code 200"),
        (255, "b", True, "rank 1: lost the ssh connection to b"),
        (255, None, False, "rank 1 ended with exit code 255"),
    ],
)
def test_what_is_said(code, host, shown, said):
    assert describe("rank 1", code, host, shown).startswith(said)


def driver_of(found, least, **limits):
    """A driver of a job on such hosts, and what it says."""
    said = []
    run = SimpleNamespace(
        environment=lambda elastic: {},
        events=queue.SimpleQueue(),
        console=SimpleNamespace(say=said.append),
        server=SimpleNamespace(begin=lambda plan: None),
        processes=[],
    )
    elastic = Elastic(len(found), least, None, lambda: found, **limits)
    driver = Driver(run, elastic, found)
    driver._offered = dict(found)
    driver.rounds.begin(slots([*found]))
    return driver, said


@pytest.mark.parametrize(
    ("codes", "least", "code"),
    [
        ((0, 0, 0), 1, 0),
        # Rank 0 has done all that is left to do, and enough are there.
        ((0, 137, 134), 1, 0),
        ((0, 137, 134), 2, 137),
        # What it writes behind the training may be missing.
        ((137, 0, 0), 1, 137),
        # No loss of a worker: its script has failed.
        ((0, 1, 137), 1, 1),
        ((137, 137, 134), 1, 137),
    ],
)
def test_who_is_lost_after_elastic_training(codes, least, code):
    driver, said = driver_of(dict.fromkeys("012", 1), least)
    for host, end in zip("012", codes, strict=True):
        driver.workers[f"{host}:0"] = ended(end, name=host)
        driver.rounds.end(f"{host}:0")
    assert driver.verdict() == code
    assert len(said) == (code != 0)


@contextlib.contextmanager
def another_round_for(driver, *keys):
    """Let workers ask for another round."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for key in keys:
            driver.rounds._told.add(key)
            ask = threading.Thread(target=driver.rounds.place, args=(key, ours))
            ask.daemon = True
            ask.start()
        yield


def test_falling_below_the_least_is_said():
    driver, said = driver_of({"a": 1, "b": 1}, 2, timeout_s=1)
    driver.workers = {"a:0": ended(137), "b:0": ended(None)}
    driver.rounds.end("a:0")
    with another_round_for(driver, "b:0"):
        assert wait_until(lambda: driver._step() == 1)
    assert "slots for workers: 1, --min-np asks for 2; waiting" in said[0]
    assert "there were not 2 slots within 1 s: add hosts" in said[1]


def test_a_worker_whose_host_has_gone_is_ended():
    hosts = {"a": 1, "b": 1}
    driver, said = driver_of(hosts, 1)
    stopped = []
    for name in hosts:
        driver.workers[f"{name}:0"] = ended(None, name=name)
        driver.workers[f"{name}:0"].stop = lambda name=name: stopped.append(
            name
        )
    del hosts["b"]
    told = []
    driver._run.server.put = lambda key, value: told.append((key, value[1]))
    driver._run.server.values = {LISTENERS_SCOPE: {}}
    assert driver._step() is None
    # As horovod.runner.elastic.worker.HostUpdateResult.removed.
    assert told == [("hosts_updated", 1)]
    with another_round_for(driver, "a:0", "b:0"):
        assert wait_until(lambda: driver._step() or stopped)
    assert stopped == ["b"]
    assert "worker b leaves" in said[0]
    assert [*driver.rounds.plan] == ["a:0"]
