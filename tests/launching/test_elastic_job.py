"""The hosts of an elastic job, and when its workers are told their ranks."""

import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching import elastic_job
from keras_towers.launching.elastic_job import (
    ElasticHosts,
    ElasticOptions,
    ElasticRounds,
    discover_by_script,
)
from keras_towers.rendezvous.hosts import place_ranks
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.core


def test_slots_of_one_machine_are_hosts_of_their_own():
    slots = {f"127.0.0.{n}": 1 for n in (1, 2, 3)}
    assert ElasticOptions(1, 1, max_ranks=3).discover() == slots
    hosts = {"127.0.0.1": 2, "localhost": 1, "192.0.2.1": 4}
    found = ElasticOptions(2, 2, None, hosts).discover()
    assert found == slots | {"192.0.2.1": 4}


def test_discovered_hosts(tmp_path):
    path = tmp_path / "discover.sh"
    found = discover_by_script(write_executable(path, "echo a:2; echo b"))
    assert found == {"a": 2, "b": 1}
    # There may be some later.
    assert discover_by_script(write_executable(path, "true")) == {}
    fails = write_executable(path, "echo no cluster >&2; exit 3")
    with pytest.raises(TowerError, match="exit code 3: no cluster"):
        discover_by_script(fails)


def test_discovery_that_fails_for_a_while():
    answers = iter(
        [{"b": 1}, *3 * [TowerError("x")], {}, TowerError("x"), TowerError("y")]
    )

    def discover():
        answer = next(answers)
        if isinstance(answer, TowerError):
            raise answer
        return answer

    said = []
    hosts = ElasticHosts(discover, {"a": 1}, (5, 60), said.append)
    found = []
    for _ in range(7):
        hosts.discover()
        found.append(hosts.available())
    assert found == [*4 * [{"b": 1}], *3 * [{}]]
    assert [line[0] for line in said] == ["x", "x", "y"]


def test_hosts_that_are_avoided_for_a_while(monkeypatch):
    now = 100.0
    monkeypatch.setattr(elastic_job.time, "monotonic", lambda: now)
    found = {"a": 1, "b": 2, "c": 1}
    hosts = ElasticHosts(lambda: {"d": 1, **found}, found, (5, 30), print)
    assert list(hosts.available()) == ["a", "b", "c"]
    for pause_s in (5, 10, 20, 30, 30):
        oldest = next(iter(hosts.available()))
        hosts.avoid("a")
        now += pause_s - 1
        assert "a" not in hosts.available()
        now += 1
        # It returns with a new worker, after hosts that have the state.
        assert list(hosts.available())[-1] == "a"
    assert oldest == "b"
    hosts.discover()
    assert list(hosts.available()) == ["b", "c", "a", "d"]


class Job:
    """Does a launcher's part: the next round has the remaining workers."""

    def __init__(self, hosts):
        self.rounds = ElasticRounds(self.left)
        self.begin(hosts)

    def begin(self, hosts):
        self.hosts = hosts
        self.rounds.begin_round(place_ranks(hosts))

    def left(self):
        Thread(target=self.follow).start()

    def dies(self, host):
        self.rounds.record_end(f"{host}:0")

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

        job.asks = lambda host: ask(job.rounds.place_worker, f"{host}:0")
        job.holds = lambda rank: ask(job.rounds.hold_worker, rank)
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
