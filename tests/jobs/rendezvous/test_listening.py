"""Servers that take connections to their own address only."""

import contextlib
import logging
import os
import socket
import time

import pytest

from keras_towers.foundation import settings, system
from keras_towers.jobs.rendezvous import listening

V4, V6 = socket.AF_INET, socket.AF_INET6


def server(address, family=V4):
    """Listens on all interfaces, as TensorFlow's server does."""
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("", int(address.rpartition(":")[2])))
    made.listen()
    return made


def raises(error):
    raise error


def free(host):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"{host}:{probe.getsockname()[1]}"


def answering(address, *hosts):
    """Those of some hosts at which a server at the port of an address is."""
    port, found = int(address.rpartition(":")[2]), []
    for host in hosts:
        try:
            # A dropped packet is not even refused.
            socket.create_connection((host, port), 0.3).close()
            found.append(host)
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    ("host", "family", "yes", "no"),
    [
        ("127.0.0.2", V4, ["127.0.0.2"], ["127.0.0.1", "127.0.0.3", "::1"]),
        ("127.0.0.2", V6, ["127.0.0.2"], ["127.0.0.1", "127.0.0.3", "::1"]),
        ("[::1]", V6, ["::1"], ["127.0.0.1"]),
        ("localhost", V6, ["127.0.0.1"], ["127.0.0.2"]),
        ("0.0.0.0", V4, ["127.0.0.1"], []),
    ],
)
def test_only_the_named_address_answers(host, family, yes, no):
    address, other_address = free(host), free("127.0.0.1")
    before = sorted(os.listdir("/proc/self/fd"))
    with listening.reachable_only_at(address):
        other, made = server(other_address), server(address, family)
    with made, other:
        assert answering(address, *yes, *no) == yes
        # Other sockets of the process are left alone.
        assert answering(other_address, "127.0.0.3")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_connections_survive_an_interrupted_link():
    """Whether the server accepts them before or after it is known."""
    address = free("127.0.0.2")
    port = int(address.rpartition(":")[2])
    with contextlib.ExitStack() as stack:

        def connect(host):
            link = socket.create_connection((host, port))
            return stack.enter_context(link)

        def accept(wait_s=0.0):
            time.sleep(wait_s)
            return stack.enter_context(made.accept()[0])

        with listening.reachable_only_at(address):
            made = stack.enter_context(server(address))
            stranger = connect("127.0.0.1")
            early, _ = accept(), connect("127.0.0.2")
            waiting = system.InThread(lambda: accept(0.3))
        connect("127.0.0.2")
        for end in (early, waiting.result(), accept()):
            option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            assert end.getsockopt(*option) == 1000 * settings.LOST_S
        # It came in by another address.
        stranger.sendall(b"data")
        early.settimeout(0.3)
        with pytest.raises(TimeoutError):
            early.recv(1)


@pytest.mark.parametrize("found", ["192.0.2.7", "127.0.1.1", None], ids=str)
def test_a_name_that_other_machines_resolve_differently_is_not_restricted(
    found, monkeypatch
):
    """A service's name is no address of this machine; Debian's own is one."""

    def resolve(host, *arguments, **options):
        known = [(V4, 1, 6, "", (found, 0))]
        return known if found else raises(socket.gaierror("unknown"))

    address = free("a-name")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolve)
        with listening.reachable_only_at(address):
            made = server(address)
    with made:
        assert answering(address, "127.0.0.1")


def test_a_kernel_without_filters_is_a_warning(monkeypatch, caplog):
    address, permission = free("127.0.0.2"), OSError(1, "Not permitted")
    monkeypatch.setattr(
        listening, "_attach_filter", lambda *_: raises(permission)
    )
    with caplog.at_level(logging.WARNING), listening.reachable_only_at(address):
        made = server(address)
    made.close()
    assert f"{address} can be reached at all addresses" in caplog.text
