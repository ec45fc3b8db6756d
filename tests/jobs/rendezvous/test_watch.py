"""Which ranks are waited for, and when that is said."""

import dataclasses
import logging
import math
import queue
import sys
import threading

import pytest

from keras_towers import TowerError
from keras_towers.foundation import settings
from keras_towers.foundation.errors import failed_elsewhere, shorten
from keras_towers.jobs.rendezvous import activity, watch as watch_lib
from keras_towers.jobs.rendezvous.liveness import TaskState
from keras_towers.jobs.rendezvous.store import (
    ERROR,
    OUTSIDE,
    Endpoint,
    StoreClient,
)
from tests.kit.leaving import Boom
from tests.kit.processes import wait_until
from tests.kit.scripts import run_python

PREPARES = "the preparation of step 1"
LATE = {"rank 1": "is still in step 2"}
SILENT = {"rank 1 on b": TaskState.LOST}


class Store:
    """Answers like a store whose server knows the other ranks."""

    def __init__(self, awaited=(), gone=(), error=None, apart=()):
        self.answer = {
            "awaited": dict(awaited),
            "apart": dict(apart),
            "gone": dict(gone),
        }
        self.error = error
        self.reports = []

    def report(self, rank, progress):
        self.reports.append(dataclasses.replace(progress))
        if self.error:
            raise self.error
        return self.answer


@pytest.fixture
def exits(monkeypatch):
    """The exit codes of the process, whose thread stops at the exit."""
    found, over = [], threading.Event()

    def leave(code):
        found.append(code)
        over.wait(60)

    monkeypatch.setattr(watch_lib.os, "_exit", leave)
    return found, over


@pytest.fixture
def watch(exits):
    started = []

    def start(store, marks, warning_s=0.3, **options):
        one = watch_lib.StallWatch(0, 2, store, warning_s, **options)
        started.append(one)
        for mark in marks:
            activity.mark(mark)
        started[-1].start()

    yield start
    activity.mark("")
    for one in started:
        one.stop()
        exits[1].set()
        one.join(60)
        assert not one.is_alive()


@pytest.mark.parametrize(
    ("marks", "late", "said"),
    [
        (["step 2", "step 3"], LATE, "rank 1 is still in step 2."),
        (["step 2", "step 3"], {}, None),
        # Outside of training there is nothing to wait for.
        (["step 3", ""], LATE, None),
    ],
)
def test_a_rank_that_waits_warns(watch, caplog, marks, late, said):
    store = Store(late)
    with caplog.at_level(logging.WARNING, "keras_towers"):
        watch(store, marks)
        # Six times it reports until a warning is due.
        wait_until(lambda: len(store.reports) > 24 or caplog.records)
    last = store.reports[-1]
    assert (last.position, last.action) == ([0, 2, 0], marks[-1])
    assert last.waits == bool(marks[-1])
    texts = [record.getMessage() for record in caplog.records]
    assert bool(texts) == bool(said)
    if said:
        assert texts[0].startswith("rank 0 has waited for ")
        assert texts[0].endswith(f" s in step 3: {said}")


@pytest.mark.parametrize(
    ("store", "marks", "said"),
    [
        (Store(gone=SILENT), ["step 0"], "rank 1 on b is lost: it gives"),
        # A rank that does not wait needs no other: a save goes on to its end.
        (Store(gone=SILENT), ["step 0", ""], None),
        (Store(error=ConnectionRefusedError()), ["step 0"], "b has ended."),
        (Store(error=OSError("no route")), ["step 0"], "b is lost: it gives"),
    ],
)
def test_a_rank_that_waits_for_a_lost_one_ends(
    monkeypatch, capfd, exits, watch, store, marks, said
):
    monkeypatch.setattr(watch_lib.settings, "LOST_S", 0.3)
    codes, _ = exits
    # The store is at the first of them.
    monkeypatch.setattr(activity.this_rank, "rank0_name", "rank 1 on b")
    watch(store, marks)
    assert wait_until(lambda: codes if said else len(store.reports) > 12)
    assert codes == ([75] if said else [])
    assert (said or "") in capfd.readouterr().err


@pytest.mark.parametrize(
    ("store", "limit_s", "said"),
    [
        (Store(gone={"rank 1": TaskState.ENDED}), 0, "rank 1 has ended"),
        (Store({"rank 1": f"is still {OUTSIDE}"}), 0.5, f"is still {OUTSIDE}"),
        # Started again, these may come.
        (Store(LATE), 0.5, None),
        (Store(gone=SILENT), 0, None),
    ],
)
def test_a_call_that_other_ranks_do_not_make_is_given_up(
    exits, watch, store, limit_s, said
):
    codes, over = exits
    watch(store, ["the beginning of evaluate"], shutdown_s=limit_s)
    with activity.refusing_by(Boom):
        if said is None:
            watch_lib.wait_for_ranks(lambda: wait_until(lambda: codes))
            assert codes == [75]
            return
        with pytest.raises(Boom, match=said):
            watch_lib.wait_for_ranks(lambda: over.wait(60))
    assert not codes


def test_a_call_that_all_ranks_make_returns_or_raises_what_it_does():
    assert watch_lib.wait_for_ranks(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        watch_lib.wait_for_ranks(lambda: 1 / 0)


def test_what_is_known_of_ranks_stays_known_while_the_store_is_asked():
    """By another thread, too: what ends a wait says which rank has ended."""
    known = []

    class Asked(Store):
        def report(self, rank, progress):
            known.append((dict(watch._awaited), watch.gone))
            return super().report(rank, progress)

    ended = {"rank 1": TaskState.ENDED}
    watch = watch_lib.StallWatch(0, 2, Asked(LATE, ended))
    watch.refresh()
    watch.refresh()
    assert known == [({}, {}), (LATE, ended)]


def test_a_step_that_other_ranks_never_make_ends_with_the_error(
    capfd, exits, watch
):
    codes, _ = exits
    with activity.refusing_by(lambda ended: Boom(f"{ended}, and is needed")):
        watch(Store(gone={"rank 1": TaskState.ENDED}), ["train_on_batch"])
        assert wait_until(lambda: codes)
    # Not to be started again.
    assert codes == [1]
    assert "rank 1 has ended, and is needed" in capfd.readouterr().err


def test_a_stalled_job_ends_without_warnings_too(
    monkeypatch, capfd, exits, watch
):
    """As with ``--stall-warning 0 --stall-shutdown 60``."""
    monkeypatch.setattr(watch_lib.settings, "STALL_BEAT_S", 0.05)
    codes, _ = exits
    watch(Store(LATE), ["step 2"], warning_s=math.inf, shutdown_s=0.3)
    assert wait_until(lambda: codes)
    assert codes == [75]
    assert "rank 1 is still in step 2. Ending" in capfd.readouterr().err


def test_a_rank_that_prepares_a_step_does_not_wait(watch, caplog):
    store = Store(LATE)
    with caplog.at_level(logging.WARNING, "keras_towers"):
        watch(store, ["step 1"])
        with activity.preparing():
            wait_until(lambda: len(store.reports) > 24)
            assert store.reports[-1].action == PREPARES
            assert not (store.reports[-1].waits or caplog.records)
        assert wait_until(lambda: caplog.records)
    last = store.reports[-1]
    assert (last.position, last.action) == ([0, 1, 0], "step 1")


def test_a_step_waits_in_its_exchanges_only(watch, caplog):
    """Its data may take long, and what it computes, on all ranks."""
    store = Store(LATE)
    with caplog.at_level(logging.WARNING, "keras_towers"):
        watch(store, [])
        activity.mark("step 1", exchanges=True)
        wait_until(lambda: len(store.reports) > 24)
        assert not (store.reports[-1].waits or caplog.records)
        with activity.this_rank.exchanges.running("sum"):
            assert wait_until(lambda: caplog.records)
            last = store.reports[-1]
            assert (last.exchanges, last.in_python) == (["sum"], True)
    assert last.position == [0, 1, 1]


def test_a_rank_that_python_lets_wait_outside_of_a_call_warns(watch, caplog):
    with caplog.at_level(logging.WARNING, "keras_towers"):
        watch(Store(LATE), [""])
        with (
            activity.this_rank.exchanges.running("sum"),
            activity.doing("compares"),
        ):
            assert wait_until(lambda: caplog.records)
    assert " s in an exchange: rank 1" in caplog.records[0].getMessage()


APART = {"rank 0": "is in step 3", "rank 1": "compares the model"}
SAID = "the ranks do different things: rank 0 is in step 3; rank 1 compares"


def test_a_rank_whose_exchange_no_other_comes_to_fails(exits, watch):
    watch(Store(apart=APART), ["step 3"])
    with pytest.raises(TowerError, match=SAID):
        watch_lib.wait_for_ranks(lambda: exits[1].wait(60))
    assert not exits[0]


def test_a_wait_in_vain_that_nothing_interrupts_ends_the_process(
    capfd, exits, watch
):
    codes, _ = exits
    store = Store(apart=APART)
    watch(store, ["step 3"])
    assert wait_until(lambda: codes)
    # Another rank may fail before that, which ends the call.
    assert len(store.reports) > 3
    assert codes == [1]
    assert SAID in capfd.readouterr().err


def test_ranks_do_other_things_until_a_failed_call_has_ended(exits, watch):
    store = Store(apart=APART)
    watch(store, ["step 3"])
    activity.this_rank.in_order = False
    with activity.this_rank.exchanges.running("sum"):
        wait_until(lambda: len(store.reports) > 24)
    assert not (exits[0] or store.reports[-1].exchanges)
    activity.this_rank.begin_round(1)
    seen = len(store.reports)
    wait_until(lambda: len(store.reports) > seen + 1)
    assert store.reports[-1].position == [1, 0, 0]


def test_no_watch_without_other_ranks_or_a_store(monkeypatch):
    watched = []
    monkeypatch.setattr(watch_lib.StallWatch, "start", watched.append)
    monkeypatch.setattr(activity.this_rank, "watch", None)
    for at, size in ((None, 2), (Endpoint("127.0.0.1", 1, "s"), 1)):
        client = at and StoreClient(at)
        monkeypatch.setattr(
            watch_lib.store_lib, "store_of_job", lambda one=client: one
        )
        watch_lib.start_watch(0, size)
    assert not watched


@pytest.mark.parametrize(
    ("variables", "limits"),
    [
        ({}, (settings.STALL_WARNING_S, settings.STALL_SHUTDOWN_S)),
        (
            {settings.ENV_STALL_WARNING: "7", settings.ENV_STALL_SHUTDOWN: "9"},
            (7, 9),
        ),
        # It ends the job all the same.
        (
            {settings.ENV_STALL_DISABLE: "1", settings.ENV_STALL_SHUTDOWN: "9"},
            (math.inf, 9),
        ),
    ],
)
def test_when_a_watch_warns_and_ends_the_job(monkeypatch, variables, limits):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made, store = [], Store()
    monkeypatch.setattr(watch_lib, "StallWatch", lambda *of: made.append(of))
    monkeypatch.setattr(activity.this_rank, "watch", None)
    monkeypatch.setattr(watch_lib.store_lib, "store_of_job", lambda: store)
    # What is made here is no watch that could start.
    with pytest.raises(AttributeError):
        watch_lib.start_watch(1, 2)
    assert made == [(1, 2, store, *limits)]


_AT_EXIT = """
import atexit
from keras_towers.jobs.rendezvous import watch

class Watch:
    def __init__(self, rank, size, *_):
        self.rank, self.size = rank, size

    def start(self):
        print(f"{self.rank} starts")

    def stop(self):
        print(f"{self.rank} stops")

watch.StallWatch, watch.store_lib.store_of_job = Watch, lambda: "a store"
watch.start_watch(1, 2)
atexit.register(print, "ranks meet")
watch.start_watch(0, 2)
"""


def test_what_ranks_do_at_the_end_of_the_script_is_watched():
    end = run_python("-c", _AT_EXIT)
    said = ["1 starts", "1 stops", "0 starts", "ranks meet", "0 stops"]
    assert end.stdout.splitlines() == said, end.stderr


def test_the_launcher_learns_whether_another_rank_is_why_a_script_ends(
    job_store, monkeypatch
):
    of_other = failed_elsewhere("fit", "1")
    handled, own = KeyError("a"), ValueError("mine")
    handled.__context__ = of_other
    for error, follows in ((of_other, True), (handled, True), (own, False)):
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        watch_lib.tell_error(3)
        assert job_store.get(f"{ERROR}3") == [shorten(error), follows]


def test_thirty_silent_processes_are_found_as_fast_as_one():
    # No poll ends before all of them have begun.
    asked, found = threading.Barrier(30), queue.SimpleQueue()

    def answers(rank):
        asked.wait(10)
        return False

    watch = watch_lib.AnswerWatch(range(30), answers, 0.01, found.put)
    watch.start()
    try:
        assert found.get(timeout=60) == list(range(30))
    finally:
        asked.abort()
        watch.stop()
    assert not watch.is_alive()
