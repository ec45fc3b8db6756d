"""What ranks are told, and how far elastic jobs may go."""

import pytest

from keras_towers.agent import set_up_host
from keras_towers.launching.elastic_job import elastic_options
from keras_towers.launching.rank_process import exported
from keras_towers.rendezvous.rank_environment import (
    job_environment,
    process_environment,
)
from keras_towers.rendezvous.store import Endpoint, token

pytestmark = pytest.mark.core

ADDRESS = f"127.0.0.1:1234/{token('s')}"
TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
SHARED = "PYTHONHASHSEED"
DISABLED = "HOROVOD_STALL_CHECK_DISABLE"


@pytest.mark.parametrize(
    ("changes", "inherited", "name", "value"),
    [
        ({}, {}, "HOROVOD_GLOO_IFACE", "lo"),
        # Each agent finds its own.
        ({"interface": None}, {}, "HOROVOD_GLOO_IFACE", None),
        ({}, {}, "HOROVOD_GLOO_RENDEZVOUS_ADDR", ADDRESS),
        ({}, {}, "HOROVOD_GLOO_RENDEZVOUS_PORT", "1234"),
        ({}, {"NO_PROXY": "a,b"}, "no_proxy", "a,b,127.0.0.1"),
        ({}, {"no_proxy": "*"}, "no_proxy", "*"),
        ({"seed": 7}, {}, SHARED, "7"),
        ({}, {}, SHARED, None),
        ({"seed": 7}, {SHARED: "1"}, SHARED, "1"),
        ({"stall_warning_s": 0}, {}, DISABLED, "1"),
        ({}, {}, DISABLED, None),
        # The stalled rank is to be named before.
        ({}, {}, TIMEOUT, "660"),
        ({"stall_shutdown_s": 9}, {}, TIMEOUT, "300"),
        ({"elastic": True}, {}, TIMEOUT, "10"),
        # It is inherited.
        ({}, {TIMEOUT: "7"}, TIMEOUT, None),
    ],
)
def test_what_ranks_are_told(changes, inherited, name, value, monkeypatch):
    changes = dict(changes)
    for other in ("no_proxy", "NO_PROXY", SHARED):
        monkeypatch.delenv(other, raising=False)
    for other, text in inherited.items():
        monkeypatch.setenv(other, text)
    endpoint = Endpoint("127.0.0.1", 1234, "s")
    common = {"stall_warning_s": 30, "stall_shutdown_s": 600, "seed": None}
    common |= {name: changes.pop(name) for name in common.keys() & changes}
    options = {"interface": "lo", "common": process_environment(**common)}
    told = job_environment(endpoint, **options | changes)
    assert told.get(name) == value


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


def own(slots):
    """Slots of one machine are hosts of their own."""
    return {f"127.0.0.{n + 1}": 1 for n in range(slots)}


TWO = {"127.0.0.1": 2, "localhost": 1, "192.0.2.1": 4}


@pytest.mark.parametrize(
    ("changes", "limits", "hosts"),
    [
        ({"least": 1, "ranks": 1, "most": 2}, (1, 1, 2), own(2)),
        ({"least": 2, "hosts": TWO}, (2, 2, None), own(3) | {"192.0.2.1": 4}),
    ],
)
def test_how_far_an_elastic_job_may_go(changes, limits, hosts):
    given = dict.fromkeys(("ranks", "least", "most", "hosts", "script"))
    options = {"timeout_s": 60, "reset_limit": None}
    found = elastic_options(**given | changes, **options, cooldown_s=(5, 600))
    assert (found.ranks, found.least, found.most) == limits
    assert found.discover() == hosts
