"""Which hosts a script discovers, and whether ssh reaches them."""

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching import elastic_hosts
from keras_towers.launching.elastic_hosts import (
    ElasticHosts,
    discover_by_script,
)
from keras_towers.launching.rank_process import check_reachable
from tests.kit.scripts import executable

pytestmark = pytest.mark.core


def test_ssh_failure_is_one_line(tmp_path, monkeypatch):
    executable(
        tmp_path / "ssh", "printf 'first\\nno such key\\n' >&2; exit 255"
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        TowerError, match="reach host b by ssh, .*: no such key$"
    ):
        check_reachable(["b"])


def test_discovered_hosts(tmp_path):
    path = tmp_path / "discover.sh"
    found = discover_by_script(executable(path, "echo a:2; echo b"))()
    assert found == {"a": 2, "b": 1}
    # There may be some later.
    assert discover_by_script(executable(path, "true"))() == {}
    fails = discover_by_script(executable(path, "echo no cluster >&2; exit 3"))
    with pytest.raises(TowerError, match="exit code 3: no cluster"):
        fails()


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
    monkeypatch.setattr(elastic_hosts.time, "monotonic", lambda: now)
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
