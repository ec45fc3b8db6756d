"""What ranks are told, and how far elastic jobs may go."""

import sys

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching.elastic import elastic_options
from keras_towers.launching.environment import exported, job_environment
from keras_towers.launching.rendezvous import horovod
from keras_towers.rendezvous import token

pytestmark = pytest.mark.core


def told(**changes):
    options = {
        "rendezvous": "127.0.0.1",
        "port": 1234,
        "secret": "s",
        "interface": "lo",
        "stall_warning_s": 30,
        "stall_shutdown_s": 600,
        "seed": None,
        "elastic": False,
    }
    return job_environment(**options | changes)


def test_ranks_meet_on_the_interface():
    environment = told()
    assert environment["HOROVOD_GLOO_IFACE"] == "lo"
    address = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    assert address == f"127.0.0.1:1234/{token('s')}"
    assert environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "1234"
    # Each agent finds its own.
    assert "HOROVOD_GLOO_IFACE" not in told(interface=None)


def test_no_proxy_is_asked_for_the_server(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert told()["no_proxy"] == "127.0.0.1"
    monkeypatch.setenv("NO_PROXY", "a,b")
    assert told()["no_proxy"] == "a,b,127.0.0.1"
    monkeypatch.setenv("no_proxy", "*")
    assert told()["no_proxy"] == "*"


def test_one_seed_for_all(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert told(seed=7)["KERAS_TOWERS_SEED"] == "7"
    assert told(seed=7)["PYTHONHASHSEED"] == "7"
    assert "PYTHONHASHSEED" not in told()
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert told(seed=7)["PYTHONHASHSEED"] == "1"


def test_stall_warning_can_be_off():
    assert told(stall_warning_s=0)["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert "HOROVOD_STALL_CHECK_DISABLE" not in told()


def test_timeout_of_the_user_is_kept(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    patient = told(stall_shutdown_s=600)["HOROVOD_GLOO_TIMEOUT_SECONDS"]
    assert patient == "660"  # The stalled rank is to be named before.
    assert told(stall_shutdown_s=9)["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "300"
    assert told(elastic=True)["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "10"
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "7")
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" not in told()


def test_other_machines_keep_what_is_theirs():
    here = {"PATH": "/a", "HOME": "/b", "SSH_AUTH_SOCK": "c", "PYTHONPATH": "d"}
    assert exported(here) == {"PATH": "/a", "PYTHONPATH": "d"}


def options(**changes):
    values = {
        "ranks": None,
        "least": None,
        "most": None,
        "hosts": None,
        "script": None,
        "slots": 1,
        "timeout_s": 60,
        "reset_limit": None,
        "cooldown_s": (5, 600),
    }
    return elastic_options(**values | changes)


def test_slots_of_one_machine_are_hosts_of_their_own():
    elastic = options(least=1, ranks=2, most=3)
    assert elastic.divided
    assert elastic.discover() == {
        "127.0.0.1": 1,
        "127.0.0.2": 1,
        "127.0.0.3": 1,
    }


def test_hosts_are_taken_as_given():
    elastic = options(least=2, hosts={"127.0.0.1": 2, "127.0.0.2": 2})
    assert not elastic.divided
    assert (elastic.ranks, elastic.least, elastic.most) == (2, 2, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "needs --min-np or -np"),
        ({"least": 3, "ranks": 2}, "smallest first"),
        ({"least": 1, "ranks": 3, "most": 2}, "smallest first"),
        ({"least": 1, "cooldown_s": (0, 5)}, "--blacklist-cooldown-range"),
        ({"least": 1, "cooldown_s": (9, 5)}, "--blacklist-cooldown-range"),
        ({"least": 4, "hosts": {"localhost": 2}}, "4 processes are more"),
        ({"least": 1, "hosts": {"192.0.2.1": 2}}, "needs two of them"),
    ],
)
def test_options_that_do_not_fit(changes, said):
    with pytest.raises(TowerError, match=said):
        options(**changes)


def test_script_and_hosts_do_not_go_together(tmp_path):
    with pytest.raises(TowerError, match="not both"):
        options(least=1, hosts={"a": 1}, script=tmp_path)


def test_missing_horovod_is_one_line(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "horovod":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(TowerError, match="run `keras-towers install horovod`"):
        horovod("runner.http.http_server")
