"""Addresses at which this machine and its processes are reached."""

import socket

import psutil
import pytest

from keras_towers.rendezvous import network
from keras_towers.rendezvous.rank_environment import INTERFACE


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


def test_others_reach_rank_0_at_the_interface_that_is_set(monkeypatch):
    address, name = next(
        (entry.address, name)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    )
    monkeypatch.setenv(INTERFACE, name)

    class Environment:
        one_machine = False
        address = None

    assert network.reachable_address(Environment()) == address
