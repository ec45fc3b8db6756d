"""Addresses at which this machine and its processes are reached."""

import socket
from types import SimpleNamespace

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import network
from keras_towers.jobs.rendezvous.rank_environment import INTERFACE


@pytest.fixture
def listening():
    """The address of a socket that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_process_that_listens_is_reachable(listening):
    assert network.is_reachable(listening)
    assert not network.refuses_connections(listening)


def test_a_host_refuses_connections_where_nobody_listens():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert not network.is_reachable(address)
        assert network.refuses_connections(address)


@pytest.fixture
def interfaces(monkeypatch):
    """Interfaces of a machine, of which one has no IPv4 address."""
    families = {
        "lo": socket.AF_INET,
        "eth0": socket.AF_INET,
        "six": socket.AF_INET6,
    }
    found = {
        name: [SimpleNamespace(family=family, address=f"at {name}")]
        for name, family in families.items()
    }
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: found)


def test_others_reach_rank_0_at_the_interface_that_is_set(
    interfaces, monkeypatch
):
    here = SimpleNamespace(one_machine=False, address=None)
    monkeypatch.setenv(INTERFACE, "eth0")
    assert network.reachable_address(here) == "at eth0"
    for name in ("six", "none"):
        monkeypatch.setenv(INTERFACE, name)
        with pytest.raises(TowerError, match=f"{name} .* from eth0, lo"):
            network.reachable_address(here)


def test_the_store_is_at_the_interface_or_on_the_way_to_others(interfaces):
    assert network.store_address("eth0", ["none"]) == ("at eth0", "eth0")
    assert network.store_address(None, ["127.0.0.9"]) == ("127.0.0.1", None)
    with pytest.raises(TowerError, match="unknown host no.such.invalid"):
        network.store_address(None, ["no.such.invalid"])
