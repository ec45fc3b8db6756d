"""The environment of ranks."""

import pytest

from keras_towers.jobs.rendezvous.rank_environment import (
    job_environment,
    process_environment,
)
from keras_towers.jobs.rendezvous.signatures import Endpoint, path_token

pytestmark = pytest.mark.core

ENDPOINT = Endpoint("127.0.0.1", 1234, "s")
TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"


@pytest.fixture
def environment(monkeypatch):
    """The environment of ranks, by options of the job and other variables."""
    for name in ("no_proxy", "NO_PROXY", "PYTHONHASHSEED", TIMEOUT):
        monkeypatch.delenv(name, raising=False)

    def environment(warning_s=30, shutdown_s=600, **outer):
        for name, value in outer.items():
            monkeypatch.setenv(name, value)
        common = process_environment(warning_s, shutdown_s)
        return job_environment(ENDPOINT, common, None)

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


def test_sets_of_strings_have_one_order(environment):
    assert environment()["PYTHONHASHSEED"] == "0"
    assert environment(PYTHONHASHSEED="random")["PYTHONHASHSEED"] == "0"
    # It is inherited.
    assert "PYTHONHASHSEED" not in environment(PYTHONHASHSEED="1")


def test_the_stalled_rank_is_named_before_gloo_gives_up(environment):
    assert environment()[TIMEOUT] == "660"
    assert environment(shutdown_s=9)[TIMEOUT] == "300"
    assert environment(warning_s=0)["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    # It is inherited.
    assert TIMEOUT not in environment(**{TIMEOUT: "7"})
