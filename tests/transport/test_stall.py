"""Which ranks are waited for, and when that is said."""

import logging
import threading
import time

import pytest

from keras_towers.rendezvous import Rendezvous
from keras_towers.transport import stall
from keras_towers.transport.stall import Progress, waited_for

pytestmark = pytest.mark.core


def test_a_rank_whose_beat_stands_still_has_stopped():
    before = {
        1: Progress(7, "step 3", beat=5),
        2: Progress(7, "step 3", beat=5),
    }
    now = {1: Progress(7, "step 3", beat=5), 2: Progress(7, "step 3", beat=6)}
    found = waited_for(Progress(7, "step 3"), before, now)
    assert found == {1: "has stopped giving signs of life"}


def test_a_rank_that_stopped_before_it_left_word():
    found = waited_for(Progress(7, "step 3"), {1: None}, {1: None})
    assert found == {1: "has given no sign of life"}


def test_a_rank_that_is_behind_is_told_with_its_place():
    now = {1: Progress(6, "step 2 of fit", 9), 2: Progress(5, "", 9)}
    found = waited_for(Progress(7, "step 3 of fit"), {}, now)
    assert found == {
        1: "is still in step 2 of fit",
        2: "is still outside of training",
    }


def test_ranks_that_are_as_far_are_not_waited_for():
    now = {1: Progress(7, "step 3", 1), 2: Progress(8, "step 4", 1)}
    assert waited_for(Progress(7, "step 3"), {}, now) == {}


def test_a_rank_that_waits_in_another_place_is_told_with_it():
    now = {1: Progress(7, "the end of epoch 1", 1), 2: Progress(7, "", 1)}
    assert waited_for(Progress(7, "step 3 of fit"), {}, now) == {
        1: "is in the end of epoch 1",
        2: "is outside of training",
    }


class Store:
    """What the ranks of one process leave, in its memory."""

    def __init__(self):
        self.places = {}

    def put(self, rank, place):
        self.places[rank] = Progress(place.position, place.what, place.beat)

    def get(self, rank):
        return self.places.get(rank)


@pytest.fixture
def watches():
    started = []

    def start(*args, **kwargs):
        started.append(stall.StallWatch(*args, **kwargs))
        started[-1].start()
        return started[-1]

    yield start
    for watch in started:
        watch.stop()
        watch.join(5)
        assert not watch.is_alive()


def test_who_waits_warns_and_who_trains_does_not(watches, caplog):
    store = Store()
    with caplog.at_level(logging.WARNING, "keras_towers"):
        fast, slow = (watches(rank, 2, store, 1.2) for rank in (0, 1))
        for step in range(3):
            fast.mark(f"step {step}")
            slow.mark(f"step {step}")
        fast.mark("step 3")
        time.sleep(3)
    texts = {record.getMessage() for record in caplog.records}
    assert any("rank 1 is still in step 2" in text for text in texts)
    assert all("rank 0 has waited" in text for text in texts)


def test_nothing_is_said_outside_of_training(watches, caplog):
    store = Store()
    with caplog.at_level(logging.WARNING, "keras_towers"):
        one, other = (watches(rank, 2, store, 0.3) for rank in (0, 1))
        one.mark("step 0")
        one.mark("")
        other.mark("step 0")
        time.sleep(0.9)
    assert not any("rank 0 has" in r.getMessage() for r in caplog.records)


def test_the_job_is_ended_at_last(watches, monkeypatch, capfd):
    ended = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        ended.set()

    monkeypatch.setattr(stall.os, "_exit", leave)
    watch = watches(0, 2, store := Store(), 0.3, shutdown_s=0.5)
    store.put(1, Progress(1, "step 0", beat=1))
    watch.mark("step 0")
    assert ended.wait(10)
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


def test_a_server_that_is_gone_is_no_error():
    store = stall.Store(Rendezvous("127.0.0.1", "9"))
    store.put(0, Progress())
    assert store.get(1) is None
