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
def job():
    """Makes a job, whose workers ask for their places in threads."""
    pool = ThreadPoolExecutor(8)
    ends = []

    def make(hosts):
        job = Job(*hosts)

        def ask(method, *arguments):
            theirs, ours = socket.socketpair()
            ends.extend((theirs, ours))
            future = pool.submit(method, *arguments, ours)
            future.theirs = theirs
            return future

        job.asks = lambda host: ask(job.rounds.place, host, 0)
        job.holds = lambda rank: ask(job.rounds.hold, rank)
        return job

    yield make
    for end in ends:
        end.close()
    pool.shutdown()


def places(*futures):
    found = [future.result(20) for future in futures]
    return [slot and (slot.rank, slot.size) for slot in found]


def waits(*futures):
    try:
        futures[0].result(0.3)
    except TimeoutError:
        return not any(future.done() for future in futures)
    return False


def test_nobody_is_told_before_all_are_there(job):
    abc = job("abc")
    one, other = map(abc.asks, "ca")
    assert waits(one, other)
    assert places(one, other, abc.asks("b")) == [(2, 3), (0, 3), (1, 3)]


def test_one_that_dies_before_is_not_waited_for(job):
    abc = job("abc")
    one = abc.asks("b")
    abc.dies("a")
    # It did not come before; maybe it was still starting.
    assert places(one, abc.asks("c")) == [(0, 2), (1, 2)]


def test_one_that_dies_while_it_waits_is_noticed_at_once(job):
    abc = job("abc")
    one, other = map(abc.asks, "ab")
    assert waits(one, other)
    one.theirs.close()
    # Nor has one a place whose host was removed.
    assert places(one, abc.asks("d")) == [None, None]
    last = abc.asks("c")
    # The launcher does not know yet.
    assert waits(other, last)
    abc.dies("a")
    assert places(other, last) == [(0, 2), (1, 2)]


def test_later_rounds(job):
    ab = job("ab")
    for _ in range(3):
        # Who has connected and asks again wants another one.
        assert places(*map(ab.asks, "ab")) == [(0, 2), (1, 2)]
    ab.dies("b")
    assert places(ab.asks("a")) == [(0, 1)]
    # There is a new worker in the slot of the dead one.
    with ab.changed:
        ab.start("a", "b")
    assert places(*map(ab.asks, "ab")) == [(0, 2), (1, 2)]


def test_who_knows_its_rank_waits_too(job):
    abc = job("abc")
    held = [abc.holds(rank) for rank in (0, 1)]
    assert waits(*held)
    assert places(abc.asks("c"), *held) == [(2, 3), None, None]
    # It connects with all others now.
    assert places(abc.holds(0)) == [None]


def test_who_knows_its_rank_does_not_wait_for_the_dead(job):
    ab = job("ab")
    held = ab.holds(0)
    assert waits(held)
    ab.dies("b")
    assert places(held) == [None]
    # Nobody is told anything after the end.
    ab.over = True
    one = ab.asks("a")
    assert waits(one)
    one.theirs.close()
    assert places(one) == [None]
