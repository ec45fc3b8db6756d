"""Who writes what every rank saves."""

import inspect
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

import keras_towers as kt
from keras_towers.fit.calls import saving
from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import failed_calls
from keras_towers.jobs.rendezvous.store_server import StoreServer

BUFFER = io.BytesIO()


class Ranks:
    """Ranks in threads, of one of which a save asks."""

    def __init__(self, number, store):
        self._ranks = [saving._RanksOfStore(r, store) for r in range(number)]
        self._local = threading.local()

    def run(self, *acts):
        """Let ranks act at the same time; return what fails."""

        def act(rank):
            self._local.here = self._ranks[rank]
            acts[rank]()

        with ThreadPoolExecutor(len(acts)) as pool:
            ended = [pool.submit(act, rank) for rank in range(len(acts))]
            return [one.exception(60) for one in ended]

    def __getattr__(self, name):
        return getattr(self._local.here, name)


@pytest.fixture
def ranks(monkeypatch):
    store = StoreServer("127.0.0.1")
    found = Ranks(3, store)
    monkeypatch.setattr(saving, "_job", found)
    yield found
    store.stop()


@pytest.fixture
def save(ranks):
    """Saves at a path; the ranks that have written are in ``save.written``."""

    def write(filepath):
        # Other ranks look for the file while it is being written.
        threading.Event().wait(0.2)
        save.written.append((ranks.rank, filepath))

    def save(path):
        saving._save(write, path)

    save.written = []
    return save


def test_rank_0_writes_and_the_others_wait(ranks, save):
    def all_save():
        for path in ("a", "b", "a"):
            save(path)
            assert save.written[-1] == (0, path)
            together.wait(60)

    together = threading.Barrier(3)
    assert ranks.run(all_save, all_save, all_save) == [None] * 3
    assert len(save.written) == 3


def test_rank_0_may_save_alone_and_in_between(ranks, save):
    def first():
        save("mine")
        save("all")
        save("mine")

    others = [lambda: save("all")] * 2
    assert ranks.run(first, *others) == [None] * 3
    assert save.written == [(0, "mine"), (0, "all"), (0, "mine")]


def test_a_save_of_an_earlier_call_is_not_that_of_this_one(
    ranks, save, monkeypatch
):
    """Rank 0 has saved alone, then trained, and saves again with the others."""
    calls = failed_calls.calls
    ranks.run(lambda: save("last"))
    monkeypatch.setattr(calls, "number", calls.number + 1)
    seen = []

    def other():
        save("last")
        seen.append(len(save.written))

    assert ranks.run(lambda: save("last"), other, other) == [None] * 3
    assert seen == [2, 2]


def test_every_rank_writes_where_that_is_asked_for(ranks, save):
    def own():
        with kt.save_on_every_rank():
            save(f"own-{ranks.rank}")
        # Objects that are no paths are local to each rank.
        save(BUFFER)

    assert ranks.run(own, own, own) == [None] * 3
    for rank in range(3):
        assert (rank, f"own-{rank}") in save.written
        assert (rank, BUFFER) in save.written


def test_a_path_that_rank_0_does_not_save_is_that_of_another(ranks, save):
    def first():
        save("of-0")
        threading.Event().wait(0.5)
        assert save.written == [(0, "of-0")]
        ranks.go_on(in_loop=True)

    def other():
        save("of-both")
        assert (
            len({rank for rank, path in save.written if path == "of-both"}) == 1
        )
        save(f"of-{ranks.rank}")
        # Both have passed rank 0's call.
        ranks.go_on(in_loop=True)

    assert ranks.run(first, other, other) == [None] * 3
    paths = ["of-0", "of-1", "of-2", "of-both"]
    assert sorted(path for _, path in save.written) == paths
    assert {(1, "of-1"), (2, "of-2")} < {*save.written}


def test_a_failure_reaches_the_ranks_that_wait(ranks, save):
    def fail(filepath):
        if filepath == "of-both" or not ranks.rank:
            raise OSError("disk full")
        save.written.append(filepath)

    def first():
        with pytest.raises(OSError, match="disk full"):
            saving._save(fail, "all")
        ranks.go_on(in_loop=False)

    def other():
        with pytest.raises(kt.TowerError, match=r"rank 0 .*all: .*disk full"):
            saving._save(fail, "all")
        saving._save(fail, f"of-{ranks.rank}")
        saving._save(fail, "of-both")

    ended = ranks.run(first, other, other)
    assert ended[0] is None
    assert sorted(save.written) == ["of-1", "of-2"]
    told = sorted(map(type, ended[1:]), key=str)
    assert told == [OSError, kt.TowerError]


def test_a_rank_does_not_wait_for_ever(ranks, save, monkeypatch):
    monkeypatch.setenv(settings.ENV_STALL_SHUTDOWN, "1")
    _, error, _ = ranks.run(lambda: None, lambda: save("mine"), lambda: None)
    assert isinstance(error, kt.TowerError)
    assert re.search(
        "rank 1 has waited 1 s.* rank 0 to save .*mine", str(error)
    )
    assert "save_on_every_rank" in str(error)
    assert not save.written


def test_all_writers_of_keras_are_known():
    """A function of a later version that takes a path to write a model."""
    known = {getattr(owner, name) for owner, name in saving._WRITERS}
    for owner in (keras.Model, keras.saving, keras.models):
        for name in dir(owner):
            if name.startswith(("save", "export")):
                function = getattr(owner, name)
                takes = inspect.signature(function).parameters
                assert "filepath" not in takes or function in known, name
