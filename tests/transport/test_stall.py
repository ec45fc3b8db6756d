"""Which ranks are waited for, and when that is said."""

import dataclasses
import itertools
import logging
from types import SimpleNamespace

import pytest

from keras_towers.rendezvous import Rendezvous
from keras_towers.transport import stall
from keras_towers.transport.stall import Progress, waited_for
from tests.launching.jobs import wait_until

STEP = Progress(7, "step 3", 5)


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (STEP, STEP, "has stopped giving signs of life"),
        (STEP, Progress(7, "step 3", 6), None),
        (None, None, "has given no sign of life"),
        (STEP, Progress(6, "step 2 of fit", 9), "is still in step 2 of fit"),
        (STEP, Progress(5, "", 9), "is still outside of training"),
        (STEP, Progress(8, "step 4", 9), None),
        # It waits, too, but for something else.
        (STEP, Progress(7, "the end of epoch 1", 9), "is in the end of epoch"),
        (STEP, Progress(7, "", 9), "is outside of training"),
    ],
)
def test_which_ranks_are_waited_for(before, now, found):
    said = waited_for(STEP, {1: before}, {1: now}).get(1, "None")
    assert said.startswith(str(found))


class Store:
    """What another rank leaves, alive or stopped; counts the signs of ours."""

    def __init__(self, other, alive):
        self.other = other
        self.beats = itertools.count() if alive else itertools.repeat(1)
        self.signs = 0

    def put(self, rank, place):
        self.signs += 1

    def get(self, rank):
        return dataclasses.replace(self.other, beat=next(self.beats))


@pytest.fixture
def watch():
    started = []

    def start(store, marks, **options):
        started.append(stall.StallWatch(0, 2, store, 0.3, **options))
        for mark in marks:
            started[-1].mark(mark)
        started[-1].start()

    yield start
    for one in started:
        one.stop()
        one.join(60)
        assert not one.is_alive()


STEPS = ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize(
    ("marks", "other", "alive", "said"),
    [
        (STEPS, Progress(2, "step 2"), True, "rank 1 is still in step 2."),
        (STEPS, Progress(4, "step 4"), True, None),
        # Outside of training there is nothing to wait for.
        ([*STEPS, ""], Progress(2, "step 2"), False, None),
    ],
)
def test_who_waits_warns(watch, caplog, marks, other, alive, said):
    store = Store(other, alive)
    with caplog.at_level(logging.WARNING, "keras_towers"):
        watch(store, marks)
        # Six signs are given until a warning is due.
        wait_until(lambda: store.signs > 24 or caplog.records)
    texts = [record.getMessage() for record in caplog.records]
    assert bool(texts) == bool(said)
    if said:
        assert texts[0].startswith("rank 0 has waited for ")
        assert texts[0].endswith(f" s in step 3: {said}")


def test_the_job_is_ended_at_last(watch, monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(stall.os, "_exit", codes.append)
    store = Store(Progress(1, "step 0"), alive=False)
    watch(store, ["step 0"], shutdown_s=0.5)
    assert wait_until(lambda: codes)
    assert codes[0] == 75
    error = capfd.readouterr().err
    assert "rank 1 has stopped giving signs of life" in error
    assert "Ending the job" in error


def test_no_watch_without_others_or_a_server(monkeypatch):
    for name in ("ADDR", "PORT"):
        monkeypatch.delenv(f"HOROVOD_GLOO_RENDEZVOUS_{name}", raising=False)
    assert stall.from_environment(0, 2) is None
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    assert stall.from_environment(0, 1) is None
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert stall.from_environment(0, 2) is None


def test_what_a_rank_leaves_is_read_by_others():
    left = {}
    board = SimpleNamespace(put=left.__setitem__, get=left.get)
    stall.Store(board).put(1, STEP)
    assert stall.Store(board).get(1) == STEP
    assert stall.Store(board).get(2) is None


def test_a_server_that_is_gone_is_no_error():
    store = stall.Store(Rendezvous("127.0.0.1", "9"))
    store.put(0, Progress())
    assert store.get(1) is None
