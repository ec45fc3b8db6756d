"""Who writes what every rank saves."""

import functools
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import keras_towers as kt
from keras_towers import settings
from keras_towers.fit.calls import saving


class Server(dict):
    """The rendezvous server, in memory."""

    put = dict.__setitem__


def save_on_ranks(*acts):
    """Let ranks save at the same time; what each wrote, and its errors."""
    server, written = Server(), tuple([] for _ in acts)

    def run(rank, act):
        saves = saving._Saves(rank, len(acts), server)

        def write(filepath):
            # Other ranks look for the file while it is being written.
            threading.Event().wait(0.2)
            if filepath == "fails":
                raise OSError("disk full")
            written[rank].append(filepath)

        act(functools.partial(saves.save, write))

    with ThreadPoolExecutor(len(acts)) as pool:
        ended = [pool.submit(run, rank, act) for rank, act in enumerate(acts)]
        return written, [one.exception(60) for one in ended]


def in_order(*paths):
    return lambda save: [save(path) for path in paths]


def by_name_and_everywhere(save):
    save(filepath="a")
    with kt.save_on_every_rank():
        save("b")


BUFFER = io.BytesIO()


@pytest.mark.parametrize(
    ("first", "second", "written"),
    [
        (in_order("a", "b"), in_order("a", "b"), (["a", "b"], [])),
        (in_order("mine"), in_order("yours"), (["mine"], ["yours"])),
        (*[by_name_and_everywhere] * 2, (["a", "b"], ["b"])),
        # Objects that are no paths are local to each rank.
        (in_order(BUFFER), in_order(BUFFER), ([BUFFER], [BUFFER])),
    ],
    ids=["one path", "own paths", "every rank", "no path"],
)
def test_which_rank_writes(first, second, written):
    assert save_on_ranks(first, second) == (written, [None, None])


def test_one_of_the_ranks_with_a_path_of_their_own_writes():
    """They share a machine, which is not that of rank 0."""
    others = [in_order("yours", "theirs")] * 2
    written, errors = save_on_ranks(in_order("mine", "ours"), *others)
    assert errors == [None] * 3
    assert written[0] == ["mine", "ours"]
    assert sorted(written[1] + written[2]) == ["theirs", "yours"]


def test_rank_0_saves_another_file_first(monkeypatch):
    monkeypatch.setattr(settings, "SAVE_OWN_S", 0.1)
    found = save_on_ranks(in_order("mine", "ours"), in_order("ours"))
    assert found == ((["mine", "ours"], []), [None, None])


def test_two_ranks_never_write_one_file_at_the_same_time(monkeypatch, caplog):
    """Rank 0 comes to it while rank 1 writes it, and writes it behind."""
    monkeypatch.setattr(settings, "SAVE_OWN_S", 0)
    server, begun, events = Server(), threading.Event(), []

    def run(rank, *paths):
        def write(filepath):
            events.append((rank, filepath, "begins"))
            if rank:
                begun.set()
                threading.Event().wait(0.5)
            events.append((rank, filepath, "ends"))

        save = saving._Saves(rank, 2, server).save
        for path in paths:
            if rank == 0 and path == "ours":
                begun.wait(60)
            save(write, path)

    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(run, 0, "mine", "ours"),
            pool.submit(run, 1, "ours"),
        ]
        assert [end.exception(60) for end in ends] == [None, None]
    assert events[2:] == [
        (rank, "ours", what) for rank in (1, 0) for what in ("begins", "ends")
    ]
    assert "rank 1 has begun to save" in caplog.text


def test_rank_0_may_be_the_only_one(monkeypatch, caplog):
    monkeypatch.setattr(settings, "SAVE_WAIT_S", 0.3)
    monkeypatch.setattr(settings, "SAVE_OWN_S", 60)
    found = save_on_ranks(in_order(*"aaab"), in_order("b"))
    assert found == ((["a", "a", "a", "b"], []), [None, None])
    assert caplog.text.count("rank 1 does not save") == 1


def test_rank_0_writes_again_when_the_others_have_read(monkeypatch):
    """It waits for rank 1 at this path, though it missed it at another one."""
    monkeypatch.setattr(settings, "SAVE_WAIT_S", 20)
    # Rank 1 comes to its save long before rank 0, which it waits for.
    monkeypatch.setattr(settings, "SAVE_OWN_S", 60)
    again, events = threading.Event(), []

    def first(save):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(settings, "SAVE_WAIT_S", 0)
            in_order("mine", "mine", "ours")(save)
        again.set()
        save("ours")
        events.append("written again")

    def second(save):
        save("ours")
        again.wait(60)
        threading.Event().wait(0.3)
        events.append("read")
        save("ours")

    found = save_on_ranks(first, second)
    assert found == ((["mine", "mine", "ours", "ours"], []), [None, None])
    assert events == ["read", "written again"]


def test_a_save_that_rank_0_never_begins_ends(monkeypatch, caplog):
    monkeypatch.setattr(settings, "NOTICE_S", 0.1)
    monkeypatch.setenv(settings.ENV_STALL_SHUTDOWN, "1")
    written, (first, second) = save_on_ranks(in_order(), in_order("mine"))
    assert written == ([], []) and first is None
    assert "has waited 1 s for rank 0 to save" in str(second)
    assert "save_on_every_rank" in str(second)
    assert "rank 1 has waited 0 s for rank 0 to save" in caplog.text


def test_all_ranks_learn_of_a_failure():
    _, (first, second) = save_on_ranks(*[in_order("fails")] * 2)
    assert isinstance(first, OSError)
    assert isinstance(second, kt.TowerError)
    assert re.search("rank 0 could not save .*disk full", str(second))


def test_keras_is_restored_after_the_block():
    def writers():
        functions = [getattr(owner, name) for owner, name in saving._WRITERS]
        # Inside of Keras's decorators.
        return [getattr(f, "__wrapped__", f) for f in functions]

    before = writers()
    with saving.on_rank_0_only(0, 2, Server()):
        assert writers()[0] is not before[0]
    assert writers() == before
