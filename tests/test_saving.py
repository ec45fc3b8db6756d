"""Who writes what every rank saves."""

import io
import threading

import keras
import pytest

import keras_towers as kt
from keras_towers import saving

pytestmark = pytest.mark.core


class Server:
    """The rendezvous server, in memory."""

    def __init__(self):
        self.values = {}

    def get(self, key):
        return self.values.get(key)

    def put(self, key, value):
        self.values[key] = value


def save_on_two_ranks(acts):
    """Let two ranks save at the same time; what each wrote, and its errors."""
    server, written, errors = Server(), ([], []), [None, None]

    def run(rank, act):
        saves = saving._Saves(rank, 2, server)

        def write(filepath):
            # The others look for it while it is being written.
            threading.Event().wait(0.2)
            if filepath == "fails":
                raise OSError("disk full")
            written[rank].append(filepath)

        try:
            act(saves.of(write))
        except Exception as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank, act), daemon=True)
        for rank, act in enumerate(acts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return written, errors


def test_one_path_is_written_once():
    def act(save):
        save("a")
        save(filepath="b")

    assert save_on_two_ranks([act, act]) == ((["a", "b"], []), [None, None])


def test_own_paths_are_written_by_each():
    written, errors = save_on_two_ranks(
        [lambda save: save("mine"), lambda save: save("yours")]
    )
    assert written == (["mine"], ["yours"]) and errors == [None, None]


def test_rank_0_may_be_the_only_one(monkeypatch, caplog):
    monkeypatch.setattr(saving, "_PATIENCE_S", 0.3)

    def first(save):
        for path in ("a", "a", "a", "b"):
            save(path)

    written, errors = save_on_two_ranks([first, lambda save: save("b")])
    assert written == (["a", "a", "a", "b"], []) and errors == [None, None]
    assert caplog.text.count("rank 1 does not save") == 1


def test_rank_0_writes_again_when_the_others_have_read():
    reading, events = threading.Event(), []

    def first(save):
        save("a")
        reading.wait(5)
        save("a")
        events.append("written again")

    def second(save):
        save("a")
        reading.set()
        threading.Event().wait(0.3)
        events.append("read")
        save("a")

    written, _ = save_on_two_ranks([first, second])
    assert written == (["a", "a"], [])
    assert events[0] == "read"


def test_a_rank_missed_at_one_path_is_waited_for_at_others(monkeypatch):
    monkeypatch.setattr(saving, "_PATIENCE_S", 1.0)
    events = []

    def first(save):
        for path in ("mine", "mine", "ours", "ours"):
            save(path)
        events.append("written again")

    def second(save):
        save("ours")
        threading.Event().wait(0.5)
        events.append("read")
        save("ours")

    # Rank 1 comes to its save long before rank 0, which it waits for.
    monkeypatch.setattr(saving, "_OWN_S", 5.0)
    written, errors = save_on_two_ranks([first, second])
    assert written == (["mine", "mine", "ours", "ours"], [])
    assert errors == [None, None]
    assert events[0] == "read"


def test_every_rank_writes_where_it_is_told_to():
    def act(save):
        with kt.every_rank():
            save("a")
        save("b")

    assert save_on_two_ranks([act, act])[0] == (["a", "b"], ["a"])


def test_what_is_no_path_is_each_ranks_own():
    buffer = io.BytesIO()

    def act(save):
        save(buffer)

    assert save_on_two_ranks([act, act])[0] == ([buffer], [buffer])


def test_all_ranks_learn_of_a_failure():
    def act(save):
        save("fails")

    _, (first, second) = save_on_two_ranks([act, act])
    assert isinstance(first, OSError)
    assert isinstance(second, kt.TowerError)
    assert "rank 0 could not save" in str(second)
    assert "disk full" in str(second)


def test_keras_is_as_before_behind_the_block():
    before = [getattr(owner, name) for owner, name in saving._WRITERS]
    with saving.once(0, 2, Server()):
        assert keras.Model.save is not before[0]
    after = [getattr(owner, name) for owner, name in saving._WRITERS]
    assert all(a is b for a, b in zip(after, before, strict=True))
