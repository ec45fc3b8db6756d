"""When workers of an elastic job are told their ranks."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from keras_towers.launching.rounds import Rounds, slot_name


def plan(*hosts):
    return [
        SimpleNamespace(hostname=host, local_rank=0, rank=rank, size=len(hosts))
        for rank, host in enumerate(hosts)
    ]


class Job:
    """What Horovod's driver does: a round of those that have not ended."""

    def __init__(self, *hosts):
        self.hosts = hosts
        self.ended = set()
        self.wanted = set()
        self.over = False
        self.changed = threading.Condition()
        self.rounds = Rounds(self, self)
        self.rounds.begin(plan(*hosts))

    def finished(self):
        return self.over

    def any_ended(self, slots):
        return not self.ended.isdisjoint(slots)

    def forget(self, slots):
        self.ended -= slots

    def record_ready(self, host, slot):
        with self.changed:
            assert host not in self.wanted, "it would be counted twice"
            self.wanted.add(host)
            gone = {h for h in self.hosts if slot_name(h, 0) in self.ended}
            if self.wanted | gone == set(self.hosts):
                self.start(*(h for h in self.hosts if h not in gone))
            else:
                self.changed.wait_for(lambda: not self.wanted, 20)

    def start(self, *hosts):
        self.hosts, self.wanted = hosts, set()
        self.rounds.begin(plan(*hosts))
        self.changed.notify_all()

    def dies(self, host):
        self.ended.add(slot_name(host, 0))


@pytest.fixture
def asks():
    """Has workers ask for their places, each in a thread."""
    pool = ThreadPoolExecutor(8)
    ends = []

    def ask(method, *arguments):
        theirs, ours = socket.socketpair()
        ends.extend((theirs, ours))
        future = pool.submit(method, *arguments, ours)
        future.theirs = theirs
        return future

    yield ask
    for end in ends:
        end.close()
    pool.shutdown()


def place(future):
    found = future.result(20)
    return found and (found.rank, found.size)


def waits(*futures):
    try:
        futures[0].result(0.3)
    except TimeoutError:
        return not any(future.done() for future in futures)
    return False


def test_nobody_is_told_before_all_are_there(asks):
    job = Job("a", "b", "c")
    one, other = (asks(job.rounds.place, host, 0) for host in "ca")
    assert waits(one, other)
    last = asks(job.rounds.place, "b", 0)
    assert [place(f) for f in (one, other, last)] == [(2, 3), (0, 3), (1, 3)]


def test_one_that_dies_before_is_not_waited_for(asks):
    job = Job("a", "b", "c")
    one = asks(job.rounds.place, "b", 0)
    job.dies("a")
    # It did not come before; maybe it was still starting.
    other = asks(job.rounds.place, "c", 0)
    assert [place(f) for f in (one, other)] == [(0, 2), (1, 2)]


def test_one_that_dies_while_it_waits_is_noticed_at_once(asks):
    job = Job("a", "b", "c")
    one, other = (asks(job.rounds.place, host, 0) for host in "ab")
    assert waits(one, other)
    one.theirs.close()
    assert place(one) is None
    last = asks(job.rounds.place, "c", 0)
    # The launcher does not know yet.
    assert waits(other, last)
    job.dies("a")
    assert [place(f) for f in (other, last)] == [(0, 2), (1, 2)]


def test_who_has_connected_and_asks_again_wants_another_round(asks):
    job = Job("a", "b")
    for _ in range(3):
        again = [asks(job.rounds.place, host, 0) for host in "ab"]
        assert [place(f) for f in again] == [(0, 2), (1, 2)]
    job.dies("b")
    assert place(asks(job.rounds.place, "a", 0)) == (0, 1)


def test_a_new_worker_in_the_slot_of_a_dead_one(asks):
    job = Job("a", "b")
    job.dies("b")
    assert place(asks(job.rounds.place, "a", 0)) == (0, 1)
    with job.changed:
        job.start("a", "b")
    both = [asks(job.rounds.place, host, 0) for host in "ab"]
    assert [place(f) for f in both] == [(0, 2), (1, 2)]


def test_one_whose_host_was_removed(asks):
    job = Job("a", "b")
    assert place(asks(job.rounds.place, "c", 0)) is None


def test_who_knows_its_rank_waits_too(asks):
    job = Job("a", "b", "c")
    held = [asks(job.rounds.hold, rank) for rank in (0, 1)]
    assert waits(*held)
    assert place(asks(job.rounds.place, "c", 0)) == (2, 3)
    assert [f.result(5) for f in held] == [None, None]
    # It connects with all others now.
    assert asks(job.rounds.hold, 0).result(5) is None


def test_who_knows_its_rank_does_not_wait_for_the_dead(asks):
    job = Job("a", "b")
    held = asks(job.rounds.hold, 0)
    assert waits(held)
    job.dies("b")
    held.result(5)


def test_nobody_is_told_anything_after_the_end(asks):
    job = Job("a", "b")
    job.over = True
    job.dies("b")
    one = asks(job.rounds.place, "a", 0)
    assert waits(one)
    one.theirs.close()
    assert place(one) is None
