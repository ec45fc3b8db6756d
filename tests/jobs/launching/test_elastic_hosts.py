"""The hosts of an elastic job."""

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.launching import elastic_hosts
from keras_towers.jobs.launching.elastic_hosts import (
    ElasticHosts,
    ElasticOptions,
    discover_by_script,
)
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.core


def reachable(hosts):
    """All are."""


def test_slots_of_one_machine_are_counted_together():
    assert ElasticOptions(1, 1, max_ranks=3).discover() == {"localhost": 3}
    hosts = {"127.0.0.1": 2, "localhost": 1, "192.0.2.1": 4}
    found = ElasticOptions(2, 2, None, hosts).discover()
    assert found == {"localhost": 3, "192.0.2.1": 4}


def test_discovered_hosts(tmp_path):
    path = tmp_path / "discover.sh"
    found = discover_by_script(write_executable(path, "echo a:2; echo b"))
    assert found == {"a": 2, "b": 1}
    # There may be some later.
    assert discover_by_script(write_executable(path, "true")) == {}
    fails = write_executable(path, "echo no cluster >&2; exit 3")
    with pytest.raises(TowerError, match="exit code 3: no cluster"):
        discover_by_script(fails)


def test_a_host_cannot_have_any_number_of_slots(tmp_path):
    script = write_executable(tmp_path / "discover.sh", "echo a; echo b:10001")
    for options in (
        ElasticOptions(1, 1, None, script=script),
        ElasticOptions(1, 1, None, {"b": 100_000_000_000}),
    ):
        with pytest.raises(TowerError, match="b has .* slots: give it 10,000"):
            options.discover()


def test_a_name_that_is_not_known_yet_is_another_host(monkeypatch):
    known = set()

    def is_local(host):
        if host not in known:
            raise TowerError("unknown host")
        return host == "here"

    monkeypatch.setattr(elastic_hosts, "_is_local", is_local)
    options = ElasticOptions(2, 2, None, {"here": 2, "there": 1})
    assert options.discover() == {"here": 2, "there": 1}
    known.add("here")
    assert options.discover() == {"localhost": 2, "there": 1}


def test_discovery_that_fails_for_a_while(monkeypatch):
    monkeypatch.setattr(elastic_hosts, "_is_here", lambda host: False)
    answers = iter(
        [{"b": 1}, *3 * [TowerError("x")], {}, TowerError("x"), TowerError("y")]
    )

    def discover():
        answer = next(answers)
        if isinstance(answer, TowerError):
            raise answer
        return answer

    said = []
    hosts = ElasticHosts(
        discover, {"a": 1}, (5, 60), said.append, check=reachable
    )
    found = []
    for _ in range(7):
        hosts.discover()
        found.append(hosts.available())
    assert found == [*4 * [{"b": 1}], *3 * [{}]]
    assert [line[0] for line in said] == ["x", "x", "y"]


def test_hosts_that_are_avoided_for_a_while(monkeypatch):
    now = 100.0
    monkeypatch.setattr(elastic_hosts.time, "monotonic", lambda: now)
    found = {"a": 1, "b": 2, "c": 1}
    monkeypatch.setattr(elastic_hosts, "_is_here", lambda host: False)
    hosts = ElasticHosts(
        lambda: {"d": 1, **found}, found, (5, 30), print, check=reachable
    )
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


def test_a_host_where_processes_are_killed_is_avoided_the_second_time():
    found, said = {"a": 1, "b": 1}, []
    hosts = ElasticHosts(dict, found, (5, 30), said.append, check=reachable)
    hosts.avoid("a", was_killed=True)
    assert [*hosts.available()] == ["a", "b"] and said == []
    hosts.avoid("a", was_killed=True)
    assert [*hosts.available()] == ["b"]
    assert said[0].startswith("no rank starts on a for 5 s")


def test_a_job_of_fixed_size_avoids_no_host_that_it_needs():
    said = []
    hosts = ElasticHosts(
        dict, {"a": 1, "b": 1}, (5, 30), said.append, reachable, needed=1
    )
    for host in "ab":
        hosts.avoid(host)
        assert [*hosts.available()] == ["b"]
    assert len(said) == 1 and "--" not in said[0]


def test_a_new_host_joins_once_it_can_be_reached(monkeypatch):
    now = 100.0
    monkeypatch.setattr(elastic_hosts.time, "monotonic", lambda: now)
    monkeypatch.setattr(elastic_hosts, "_is_here", lambda host: False)
    answers = iter([False, True])
    said = []

    def check(hosts):
        assert hosts == ["b"]
        if not next(answers):
            raise TowerError("cannot reach host b")

    hosts = ElasticHosts(
        lambda: {"a": 1, "b": 2}, {"a": 1}, (5, 30), said.append, check
    )
    hosts.discover()
    for _ in range(2):
        assert hosts.available() == {"a": 1}
    assert said[0] == "cannot reach host b"
    now += 5
    assert hosts.available() == {"a": 1, "b": 2}
