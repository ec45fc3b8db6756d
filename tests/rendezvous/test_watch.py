"""Which ranks are waited for, and when that is said."""

import dataclasses
import itertools
import logging
import threading
import urllib.error

import pytest

from keras_towers import settings
from keras_towers.rendezvous import watch as watch_lib
from keras_towers.rendezvous.liveness import State
from keras_towers.rendezvous.store import Endpoint
from keras_towers.rendezvous.watch import Progress, waited_for
from tests.launching.jobs import wait_until

STEP = Progress(7, "step 3", 5)
PREPARES = "the preparation of step 3"


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (STEP, STEP, "has stopped giving signs of life"),
        (None, None, "has given no sign of life"),
        (STEP, Progress(6, "step 2 of fit", 9), "is still in step 2 of fit"),
        (STEP, Progress(8, "step 4", 9), None),
        # It waits, too, but for something else.
        (STEP, Progress(7, "the end of epoch 1", 9), "is in the end of epoch"),
        # It has not come to where the others wait.
        (STEP, Progress(7, PREPARES, 9), f"is in {PREPARES}"),
    ],
)
def test_which_ranks_are_waited_for(before, now, found):
    silent = [1] if before == now else []
    said = waited_for(STEP, {1: now}, silent).get(1, "None")
    assert said.startswith(str(found))


class Store:
    """What another rank leaves, alive or stopped; counts the signs of ours."""

    def __init__(self, other, alive):
        self.other = other
        self.beats = itertools.count() if alive else itertools.repeat(1)
        self.signs = 0
        self.values = {}

    def put(self, key, value):
        self.signs += key == "progress-0"
        self.values[key] = value

    def get(self, key):
        return self.values.get(key)

    def by_rank(self, key, ranks):
        place = dataclasses.replace(self.other, beat=next(self.beats))
        return {rank: dataclasses.asdict(place) for rank in ranks}


@pytest.fixture
def exits(monkeypatch):
    """What the process would have ended with; nothing follows on its thread."""
    found, over = [], threading.Event()

    def leave(code):
        found.append(code)
        over.wait(60)

    monkeypatch.setattr(watch_lib.os, "_exit", leave)
    return found, over


@pytest.fixture
def watch(exits):
    started = []

    def start(store, marks, **options):
        record = watch_lib.Record()
        one = watch_lib.StallWatch(0, 2, store, 0.3, record=record, **options)
        started.append(one)
        for mark in marks:
            record.mark(mark)
        one.start()
        return record

    yield start
    for one in started:
        one.stop()
        exits[1].set()
        one.join(60)
        assert not one.is_alive()


SILENT = "rank 1 on b", State.LOST
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


def test_the_job_is_ended_at_last(capfd, exits, watch):
    codes, _ = exits
    store = Store(Progress(1, "step 0"), alive=False)
    watch(store, ["step 0"], shutdown_s=0.5)
    assert wait_until(lambda: codes)
    assert codes == [75]
    error = capfd.readouterr().err
    assert "rank 1 has stopped giving signs of life" in error
    assert "Ending the job" in error


@pytest.mark.parametrize(
    ("lost", "marks", "said"),
    [
        ({"1": SILENT}, ["step 0"], "rank 1 on b is lost: it gives"),
        # Without a wait nobody needs them: a save goes on to its end.
        ({"1": SILENT}, ["step 0", ""], None),
        ({"0": SILENT}, ["step 0"], None),
        (ConnectionRefusedError(), ["step 0"], "rank 1 on b has ended."),
        (OSError("no route"), ["step 0"], "rank 1 on b is lost: it gives"),
    ],
)
def test_whoever_waits_for_a_rank_that_is_lost_ends(
    monkeypatch, capfd, exits, watch, lost, marks, said
):
    class Told(Store):
        def get(self, key):
            if key != watch_lib.GONE:
                return super().get(key)
            if isinstance(lost, OSError):
                raise urllib.error.URLError(lost)
            return lost

    # The store is at the first of them.
    monkeypatch.setattr(watch_lib, "rank0_name", "rank 1 on b")
    monkeypatch.setattr(watch_lib.settings, "LOST_S", 0.3)
    codes, _ = exits
    store = Told(Progress(7, "step 7"), alive=True)
    watch(store, marks)
    assert wait_until(lambda: codes if said else store.signs > 12)
    assert codes == ([75] if said else [])
    assert (said or "") in capfd.readouterr().err


def test_of_many_that_are_waited_for_some_are_named(exits, monkeypatch):
    monkeypatch.setattr(settings, "NAMED", 2)
    record = watch_lib.Record()
    store = Store(Progress(0), alive=True)
    one = watch_lib.StallWatch(0, 6, store, record=record)
    record.mark("step 1")
    one._advance()
    late = "is still outside of training"
    found = {"rank 1": late, "rank 2": late, "3 more": "likewise"}
    assert one._late_ranks(0.05) == found


def test_who_prepares_a_step_waits_for_nobody(watch, caplog):
    store = Store(Progress(1, "step 1"), alive=False)
    with caplog.at_level(logging.WARNING, "keras_towers"):
        record = watch(store, ["step 1"])
        with record.preparing():
            assert record.what == "the preparation of step 1"
            wait_until(lambda: store.signs > 24)
            assert not caplog.records
        assert wait_until(lambda: caplog.records)
    assert record.what == "step 1"


def test_no_watch_without_others_or_a_store(monkeypatch):
    watched = []
    monkeypatch.setattr(watch_lib.StallWatch, "start", watched.append)
    monkeypatch.setattr(watch_lib, "_watch", None)
    for at, size in ((None, 2), (Endpoint("127.0.0.1", 1, "s"), 1)):
        client = at and at.client()
        monkeypatch.setattr(
            watch_lib.store_lib, "from_environment", lambda one=client: one
        )
        watch_lib.watch_over(0, size)
    assert not watched
