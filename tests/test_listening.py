"""Servers that take connections to their own address only."""

import logging
import os
import socket

import pytest

from keras_towers import listening
from keras_towers.errors import TowerError


def server(address, family):
    """Listens on all interfaces, as TensorFlow's server does."""
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("", int(address.rpartition(":")[2])))
    made.listen()
    return made


def free(host):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"{host}:{probe.getsockname()[1]}"


def answers(host, address):
    try:
        port = int(address.rpartition(":")[2])
        socket.create_connection((host, port), 0.3).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_the_named_address_answers(family):
    address = free("127.0.0.2")
    with listening.only_at(address):
        made = server(address, family)
    with made:
        assert answers("127.0.0.2", address)
        assert not answers("127.0.0.1", address)
        assert not answers("127.0.0.3", address)
        assert not answers("::1", address)


def test_only_the_named_address_of_ip_version_6_answers():
    address = free("[::1]")
    with listening.only_at(address):
        made = server(address, socket.AF_INET6)
    with made:
        assert answers("::1", address)
        assert not answers("127.0.0.1", address)


def test_localhost_is_every_address_it_has():
    address = free("localhost")
    with listening.only_at(address):
        made = server(address, socket.AF_INET6)
    with made:
        assert answers("127.0.0.1", address)
        assert not answers("127.0.0.2", address)


@pytest.mark.parametrize("found", ["192.0.2.7", "127.0.1.1", None], ids=str)
def test_a_name_that_others_resolve_otherwise_is_not_restricted(
    found, monkeypatch
):
    """A service's name is no address of this machine; Debian's own is one."""

    def resolve(host, *arguments, **options):
        if found is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, 1, 6, "", (found, 0))]

    address = free("a-name")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve)
        with listening.only_at(address):
            made = server(address, socket.AF_INET)
    with made:
        assert answers("127.0.0.1", address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_port_in_use(host):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"{host}:{other.getsockname()[1]}"
        with (
            pytest.raises(TowerError, match=f"{address} .* in use by another"),
            listening.only_at(address),
        ):
            pytest.fail("was entered")


def test_all_addresses_where_all_are_named():
    address = free("0.0.0.0")
    with listening.only_at(address):
        made = server(address, socket.AF_INET)
    with made:
        assert answers("127.0.0.1", address)


def test_nothing_stays_open():
    address = free("127.0.0.2")
    before = sorted(os.listdir("/proc/self/fd"))
    with listening.only_at(address):
        made = server(address, socket.AF_INET)
    made.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_other_sockets_of_the_process_are_left_alone():
    address = free("127.0.0.2")
    other_address = free("127.0.0.1")
    with listening.only_at(address):
        other = server(other_address, socket.AF_INET)
        made = server(address, socket.AF_INET)
    with made, other:
        assert answers("127.0.0.3", other_address)


def test_a_kernel_without_filters_is_told_of(monkeypatch, caplog):
    def refuse(listener, program):
        raise OSError(1, "Not permitted")

    address = free("127.0.0.2")
    monkeypatch.setattr(listening, "_attach", refuse)
    with caplog.at_level(logging.WARNING), listening.only_at(address):
        made = server(address, socket.AF_INET)
    made.close()
    assert f"{address} can be reached at all addresses" in caplog.text
