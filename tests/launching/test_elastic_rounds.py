"""When workers of an elastic job are told their ranks."""

import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from keras_towers.launching.elastic_rounds import ElasticRounds
from keras_towers.rendezvous.hosts import place_ranks


class Job:
    """Does a launcher's part: the next round has the remaining workers."""

    def __init__(self, hosts):
        self.rounds = ElasticRounds(self.left)
        self.begin(hosts)

    def begin(self, hosts):
        self.hosts = hosts
        self.rounds.begin(place_ranks(hosts))

    def left(self):
        Thread(target=self.follow).start()

    def dies(self, host):
        self.rounds.end(f"{host}:0")

    def follow(self):
        if self.rounds.over:
            ended = self.rounds.ended
            self.begin([h for h in self.hosts if f"{h}:0" not in ended])


@pytest.fixture
def job():
    """Makes a job, whose workers ask for their places in threads."""
    pool = ThreadPoolExecutor(8)
    ends = []

    def make(hosts):
        job = Job([*hosts])

        def ask(method, who):
            theirs, ours = socket.socketpair()
            ends.extend((theirs, ours))
            future = pool.submit(method, who, ours)
            future.theirs = theirs
            return future

        job.asks = lambda host: ask(job.rounds.place, f"{host}:0")
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


def test_no_worker_gets_a_rank_before_all_have_arrived(job):
    abc = job("abc")
    one, other = map(abc.asks, "ca")
    assert waits(one, other)
    assert places(one, other, abc.asks("b")) == [(2, 3), (0, 3), (1, 3)]


def test_a_worker_that_dies_while_it_waits_is_noticed_at_once(job):
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
        # A worker that has connected and asks again wants another round.
        assert places(*map(ab.asks, "ab")) == [(0, 2), (1, 2)]
    ab.dies("b")
    assert places(ab.asks("a")) == [(0, 1)]
    # There is a new worker in the slot of the dead one.
    ab.begin(["a", "b"])
    assert places(*map(ab.asks, "ab")) == [(0, 2), (1, 2)]


def test_a_worker_that_knows_its_rank_waits_too(job):
    abc = job("abc")
    held = [abc.holds(rank) for rank in (0, 1)]
    assert waits(*held)
    assert places(abc.asks("c"), *held) == [(2, 3), None, None]
    # All workers connect now.
    assert places(abc.holds(0)) == [None]


def test_a_worker_that_knows_its_rank_does_not_wait_for_the_dead(job):
    ab = job("ab")
    held = ab.holds(0)
    assert waits(held)
    ab.dies("b")
    assert places(held) == [None]
