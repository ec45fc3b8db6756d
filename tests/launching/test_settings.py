"""The environment of ranks, and how far elastic jobs may go."""

import pytest

from keras_towers.agent import set_up_host
from keras_towers.launching.elastic_job import ElasticOptions
from keras_towers.launching.rank_process import exported
from keras_towers.rendezvous.rank_environment import (
    job_environment,
    process_environment,
)
from keras_towers.rendezvous.store import Endpoint, path_token

pytestmark = pytest.mark.core

ENDPOINT = Endpoint("127.0.0.1", 1234, "s")
TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"


@pytest.fixture
def environment(monkeypatch):
    """The environment of ranks, by options of the job and other variables."""
    for name in ("no_proxy", "NO_PROXY", "PYTHONHASHSEED", TIMEOUT):
        monkeypatch.delenv(name, raising=False)

    def environment(
        warning_s=30, shutdown_s=600, seed=None, elastic=False, **outer
    ):
        for name, value in outer.items():
            monkeypatch.setenv(name, value)
        common = process_environment(warning_s, shutdown_s, seed)
        return job_environment(ENDPOINT, common, None, elastic)

    return environment


def test_where_the_store_is(environment):
    found = environment(NO_PROXY="a,b")
    at = f"127.0.0.1:1234/{path_token('s')}"
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == at
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "1234"
    assert found["KERAS_TOWERS_STORE"] == "127.0.0.1:1234"
    assert found["no_proxy"] == "a,b,127.0.0.1"
    # Each agent finds its own.
    assert "HOROVOD_GLOO_IFACE" not in found


def test_a_seed_is_the_order_of_sets_too(environment):
    assert "PYTHONHASHSEED" not in environment()
    assert environment(seed=7)["PYTHONHASHSEED"] == "7"
    given = environment(seed=7, PYTHONHASHSEED="1")
    assert given["PYTHONHASHSEED"] == "1"


def test_the_stalled_rank_is_named_before_gloo_gives_up(environment):
    assert environment()[TIMEOUT] == "660"
    assert environment(shutdown_s=9)[TIMEOUT] == "300"
    assert environment(elastic=True)[TIMEOUT] == "10"
    assert environment(warning_s=0)["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    # It is inherited.
    assert TIMEOUT not in environment(**{TIMEOUT: "7"})


def test_what_is_not_taken_from_the_user_or_the_machine():
    environment = {"TF_NUM_INTRAOP_THREADS": "77"}
    set_up_host(environment, "127.0.0.1", 1000)
    assert environment == {
        "TF_NUM_INTRAOP_THREADS": "77",
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_IFACE": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    here = {"PATH": "/a", "HOME": "/b", "SSH_AUTH_SOCK": "c", "PYTHONPATH": "d"}
    assert exported(here) == {"PATH": "/a", "PYTHONPATH": "d"}


def test_slots_of_one_machine_are_hosts_of_their_own():
    slots = {f"127.0.0.{n}": 1 for n in (1, 2, 3)}
    assert ElasticOptions(1, 1, max_ranks=3).discover() == slots
    hosts = {"127.0.0.1": 2, "localhost": 1, "192.0.2.1": 4}
    found = ElasticOptions(2, 2, None, hosts).discover()
    assert found == slots | {"192.0.2.1": 4}
