"""Ranks leave a call that has failed on one of them, and connect again."""

import re
import threading

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import activity, failed_calls, watch
from keras_towers.jobs.rendezvous.failed_calls import (
    NEXT,
    Failure,
    JointCalls,
    State,
)
from keras_towers.jobs.rendezvous.store_server import StoreServer
from tests.kit.processes import wait_until


class Ranks:
    """What a rank knows of the others, and what is done to its connection."""

    loses_exchanges = True

    def __init__(self, rank, size, meeting):
        self.rank, self.size, self._meeting = rank, size, meeting
        self.aborted, self.left = threading.Event(), 0
        # Set once what was lost has been found, and has ended with the rest.
        self.found = threading.Event()
        self.reconnected, self.all = 0, [self]

    def abort(self):
        self.aborted.set()

    def leave(self):
        self.left += 1
        if self.reconnected:
            self.found.set()

    def renew(self):
        # By then nobody is in the call any more.
        assert all(other.left for other in self.all)

    def reconnect(self):
        self.reconnected += 1
        self._meeting.wait(20)

    def gather_objects(self, value):
        return [value]


class Walking(JointCalls):
    """Notes by which events this rank has come to another state."""

    def __init__(self):
        super().__init__()
        self.walked = []

    def _move(self, *events):
        with self._lock:
            for event in events:
                before = self.state
                super()._move(event)
                if self.state is not before:
                    self.walked.append((event, before.name, self.state.name))


@pytest.fixture
def job(monkeypatch):
    """So many ranks, each in a thread, with the calls of its process."""
    store, gone = StoreServer("127.0.0.1"), {}
    monkeypatch.setattr(failed_calls.store_lib, "store_of_job", lambda: store)
    monkeypatch.setattr(watch, "gone_ranks", lambda: gone)

    made = []

    def make(size):
        meeting = threading.Barrier(size)
        ranks = [(Walking(), Ranks(r, size, meeting)) for r in range(size)]
        for _, own in ranks:
            own.all = [other for _, other in ranks]
        made.extend(calls for calls, _ in ranks)
        return ranks

    make.gone = gone
    yield make
    for calls in made:
        # The threads that listen go on, and hear of no failure any more.
        calls.round = -1
    store.stop()


def begun(job, size):
    """So many ranks that have begun a call."""
    ranks = job(size)
    for calls, own in ranks:
        assert calls.begin(own) is None
    return ranks


def in_threads(*functions):
    results = [None] * len(functions)

    def run(index):
        results[index] = functions[index]()

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_every_transition_of_the_table(job, monkeypatch):
    (calls, own), (others, other) = job(2)

    def step():
        """What this rank has walked since the last step."""
        walked, calls.walked = calls.walked, []
        seen.update(walked)
        return walked

    seen = set()
    again = [
        ("leaves", "BROKEN", "LEAVING"),
        ("is free", "LEAVING", "BROKEN"),
        ("connects", "BROKEN", "BETWEEN"),
    ]
    begins = ("begins", "BETWEEN", "RUNNING")
    for one, ranks in ((calls, own), (others, other)):
        one.begin(ranks)
        one.end()
    assert step() == [begins, ("ends", "RUNNING", "BETWEEN")]
    # The other fails in the next call, before this one comes to it.
    others.begin(other)
    in_threads(
        lambda: others.fail(other, "my bug"),
        lambda: (
            wait_until(lambda: calls.state is State.BROKEN)
            and calls.connect_if_broken(own)
        ),
    )
    assert step() == [("fails", "BETWEEN", "BROKEN"), *again]
    # Now in it.
    calls.begin(own)
    others.begin(other)
    in_threads(
        lambda: others.fail(other, "my bug"),
        lambda: own.aborted.wait(20) and calls.fail(own, "AbortedError"),
    )
    aborted = [("fails", "RUNNING", "ABORTED"), ("ends", "ABORTED", "BROKEN")]
    assert step() == [begins, *aborted, *again]
    # When this one has seen that it may begin the next one.
    others.begin(other)
    own.aborted.clear()
    may_begin = threading.Event()

    def fails():
        assert may_begin.wait(20)
        return others.fail(other, "my bug")

    def begins_meanwhile():
        with monkeypatch.context() as patch:
            patch.setattr(calls, "connect_if_broken", hears)
            assert calls.begin(own) is None
        # It waits in a graph.
        assert own.aborted.wait(20)
        return calls.fail(own, "AbortedError")

    def hears(ranks):
        assert connect_if_broken(ranks) is None
        may_begin.set()
        assert wait_until(lambda: calls.state is State.BROKEN)

    connect_if_broken = calls.connect_if_broken
    _, found = in_threads(fails, begins_meanwhile)
    assert (found.rank, found.why) == (1, "my bug")
    late = ("begins", "BROKEN", "ABORTED")
    assert step() == [("fails", "BETWEEN", "BROKEN"), late, aborted[1], *again]
    # This one fails, and the other does not leave in time.
    monkeypatch.setattr(failed_calls.settings, "FAILED_CALL_S", 0.3)
    calls.begin(own)
    calls.fail(own, "my bug")
    assert step() == [begins, *aborted, *again[:2]]
    after = {
        (event, before.name, after.name)
        for event, afters in NEXT.items()
        for before, after in afters.items()
    }
    row = r"(\w[\w ]*?) +([A-Z]{6,}) +([A-Z]{6,}) .*"
    told = re.findall(row, failed_calls.__doc__)
    assert seen == after == {*told}
    assert len(told) == len(after)


def test_a_failure_aborts_the_calls_of_all_and_names_the_first(job):
    ranks = begun(job, 3)

    def fails():
        calls, own = ranks[1]
        return calls.fail(own, "Boom: my bug")

    def waits(rank):
        calls, own = ranks[rank]
        assert own.aborted.wait(20)
        return calls.fail(own, "AbortedError")

    found = in_threads(fails, lambda: waits(0), lambda: waits(2))
    first = Failure(1, 1, "Boom: my bug")
    assert found == [None, first, first]
    for calls, own in ranks:
        assert (own.left > 0, own.reconnected, calls.round) == (True, 1, 1)
        # The next call begins, and may fail again.
        assert calls.begin(own) is None
        own.aborted.clear()
    assert in_threads(
        lambda: ranks[2][0].fail(ranks[2][1], "another"),
        lambda: waits(0),
        lambda: waits(1),
    ) == [None, Failure(2, 2, "another"), Failure(2, 2, "another")]


@pytest.mark.parametrize("in_call", [True, False])
def test_an_exchange_that_is_lost_when_ranks_leave_ends(
    job, monkeypatch, in_call
):
    monkeypatch.setattr(failed_calls.settings, "BEAT_S", 0.1)
    (calls, own), (others, other) = job(2)
    others.begin(other)
    assert calls.connect_if_broken(own) is None
    if in_call:
        calls.begin(own)

    def waits():
        with activity.this_rank.exchanges.running("a lost one"):
            assert own.aborted.wait(20) and own.found.wait(20)
        if in_call:
            return calls.fail(own, "Horovod has been shut down")
        return calls.connect_if_broken(own)

    found = in_threads(waits, lambda: others.fail(other, "my bug"))
    assert found == [Failure(1, 1, "my bug"), None]
    assert [own.reconnected, other.reconnected] == [2, 2]
    assert calls.round == others.round == 1


def test_whether_a_call_runs_in_another_thread(job):
    (calls, own), (others, other) = job(2)
    both_run = threading.Barrier(2)

    def run(mine, ranks, not_mine):
        assert mine.begin(ranks) is None
        both_run.wait(20)
        said = [c.runs_in_another_thread() for c in (mine, not_mine)]
        both_run.wait(20)
        mine.end()
        return [*said, mine.runs_in_another_thread()]

    assert (
        in_threads(
            lambda: run(calls, own, others), lambda: run(others, other, calls)
        )
        == [[False, True, False]] * 2
    )


def test_a_step_is_repeated_on_all_ranks_or_on_none(job):
    (calls, own), (others, other) = begun(job, 2)

    def hears():
        assert own.aborted.wait(20)
        return calls.repeat(own, None)

    found = in_threads(hears, lambda: others.repeat(other, "no memory"))
    assert found == [True, True]
    # The call goes on, and may fail.
    assert (calls.number, calls.round, calls.failed) == (1, 1, 0)
    own.aborted.clear()

    def fails():
        assert own.aborted.wait(20)
        assert not calls.repeat(own, "no memory")
        return calls.fail(own, "no memory")

    found = in_threads(fails, lambda: others.fail(other, "Boom"))
    assert found == [Failure(1, 1, "Boom"), None]
    assert (calls.round, calls.failed) == (2, 1)


def test_a_call_that_fails_while_others_repeat_a_step_fails_on_all(job):
    (calls, own), (others, other) = begun(job, 2)

    def repeats():
        assert calls.repeat(own, "no memory")
        own.aborted.clear()
        assert own.aborted.wait(20)
        return calls.fail(own, "AbortedError")

    def fails():
        assert other.aborted.wait(20)
        return others.fail(other, "Boom")

    assert in_threads(repeats, fails) == [Failure(1, 1, "Boom"), None]
    assert (calls.round, calls.failed) == (2, 1)


def test_nobody_is_the_cause_of_what_all_ranks_raise(job):
    found = in_threads(
        *(
            lambda calls=calls, own=own: calls.fail(own, "the same")
            for calls, own in begun(job, 2)
        )
    )
    assert found == [None, None]


def test_a_call_that_has_failed_elsewhere_does_not_begin(job):
    (calls, own), (late, other) = begun(job, 2)
    for one in (calls, late):
        one.end()
    # Rank 0 fails in its second call, before rank 1 comes to it.
    calls.begin(own)
    found = in_threads(
        lambda: calls.fail(own, "my bug"),
        lambda: (
            wait_until(lambda: late.state is State.BROKEN) and late.begin(other)
        ),
    )
    assert found == [None, Failure(0, 2, "my bug")]
    assert calls.begin(own) is None
    assert late.begin(other) is None
    assert calls.number == 3


def test_a_call_that_others_have_left_well_does_not_fail(job):
    """In a loop over batches, a rank may be one call ahead."""
    (calls, own), (ahead, other) = begun(job, 2)
    ahead.end()
    found = in_threads(
        lambda: calls.fail(own, "my bug"),
        lambda: (
            wait_until(lambda: ahead.state is State.BROKEN)
            and ahead.begin(other)
        ),
    )
    assert found == [None, None]


def test_a_call_begins_again_if_the_one_before_has_failed(job):
    (calls, own), (ahead, other) = job(2)
    calls.begin(own)
    for _ in range(2):
        ahead.end()
        ahead.begin(other)

    def goes_on():
        assert other.aborted.wait(20)
        return ahead.begin_again(other)

    assert in_threads(lambda: calls.fail(own, "my bug"), goes_on) == [
        None,
        True,
    ]
    assert calls.begin(own) is None
    assert calls.number == ahead.number == 2
    assert not ahead.begin_again(other)


def test_a_rank_does_not_wait_long_for_others_or_for_ended_ones(
    job, monkeypatch
):
    monkeypatch.setattr(failed_calls.settings, "FAILED_CALL_S", 0.3)
    (calls, own), _ = job(2)
    calls.begin(own)
    assert calls.fail(own, "my bug") is None
    assert own.reconnected == 0
    job.gone["rank 1"] = "has ended"
    with pytest.raises(TowerError, match="rank 1 has ended"):
        calls.begin(own)


def test_a_failure_is_raised_although_the_store_has_gone(job, monkeypatch):
    (calls, own), _ = job(2)
    calls.begin(own)
    store = failed_calls.store_lib.store_of_job()

    def refuse(*_):
        raise ConnectionRefusedError

    monkeypatch.setattr(store, "give", refuse)
    monkeypatch.setattr(store, "setdefault", refuse)
    assert calls.fail(own, "my bug") is None
    assert calls.state is State.BROKEN
    with pytest.raises(TowerError, match="the job's store has ended"):
        calls.begin(own)


def test_without_a_store_ranks_connect_when_the_next_call_begins(monkeypatch):
    monkeypatch.setattr(failed_calls.store_lib, "store_of_job", lambda: None)
    calls, own = JointCalls(), Ranks(0, 2, threading.Barrier(1))
    calls.begin(own)
    assert calls.fail(own, "my bug") is None
    assert (own.left, own.reconnected) == (1, 0)
    assert calls.begin(own) is None
    assert own.reconnected == 1
