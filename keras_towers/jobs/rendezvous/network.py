"""Network addresses of this machine and of other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import Any

import psutil

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.agent import interface_towards, source_address
from keras_towers.jobs.rendezvous.launchers import ClusterEnvironment
from keras_towers.jobs.rendezvous.rank_environment import INTERFACE

LOOPBACK = "127.0.0.1"
# A remote address, to look up a route. It is reserved for documentation.
_REMOTE = "192.0.2.1"


def resolve(host: str) -> str:
    """Return the IPv4 address of a host."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise TowerError(f"unknown host {host}: {error}") from None


def is_local(host: str) -> bool:
    """Whether a host is this machine."""
    address = resolve(host)
    is_loopback = ipaddress.ip_address(address).is_loopback
    return is_loopback or is_local_address(address)


def is_local_address(address: str) -> bool:
    """Whether an IPv4 or IPv6 address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Only addresses of this machine can be bound.
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_reachable(address: str) -> bool:
    """Whether a process listens at ``host:port``."""
    return _connection_error(address) is None


def refuses_connections(address: str) -> bool:
    """Whether the host of a ``host:port`` is up but refuses connections."""
    return isinstance(_connection_error(address), ConnectionRefusedError)


def _connection_error(address: str) -> OSError | None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1) as link:
            # If nobody listens, the kernel may choose that very port for this
            # end of the connection, and connect the socket to itself.
            to_itself = link.getsockname() == link.getpeername()
            return ConnectionRefusedError() if to_itself else None
    except OSError as error:
        return error


def own_sockets(status: str) -> list[Any]:
    """Return this process's TCP sockets in a status, by ``psutil``."""
    ends = psutil.Process().net_connections("tcp")
    return [end for end in ends if end.status == status]


def copies_of(
    sockets: Iterable[Any], stack: contextlib.ExitStack
) -> list[socket.socket]:
    """Return copies of sockets of this process, also of those opened in C++.

    An option that is set on a copy is set on the socket.

    Args:
        sockets: as ``own_sockets`` returns them.
        stack: closes the copies.
    """
    copies = []
    for end in sockets:
        # It may have been closed since.
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(end.fd))
            copies.append(stack.enter_context(copy))
    return copies


def task_answers(address: str) -> bool:
    """Whether a task of TensorFlow's runtime at ``host:port`` answers.

    The runtime's threads answer even while Python is busy there. A connection
    would not do: the kernel accepts them for a stopped process, too.
    """
    import grpc

    # A proxy does not know the job's hosts.
    direct = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, direct) as channel:
        get_status = channel.unary_unary("/tensorflow.WorkerService/GetStatus")
        try:
            get_status(b"", timeout=settings.TASK_ANSWER_S)
        except grpc.RpcError:
            return False
    return True


def address_of_name(name: str) -> str | None:
    """Return the first address of this machine for its own name, or None."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses = (str(address) for *_, (address, *_) in found)
    return next(filter(is_local_address, addresses), None)


def store_address(
    interface: str | None, remote: Iterable[str]
) -> tuple[str, str | None]:
    """Return the address for a job's store, and its ranks' interface if known.

    Args:
        interface: the network interface that the user has chosen, if any.
        remote: the hosts other than this machine.
    """
    if interface:
        known = {
            name: entry.address
            for name, entries in psutil.net_if_addrs().items()
            for entry in entries
            if entry.family == socket.AF_INET
        }
        if interface not in known:
            raise TowerError(
                f"there is no network interface {interface} with an IPv4 "
                f"address here; choose from {', '.join(sorted(known))}"
            )
        return known[interface], interface
    for host in remote:
        try:
            # Interface names differ between hosts: each rank's agent looks up
            # the one with a route to this machine.
            return source_address(resolve(host)), None
        except OSError as error:
            raise TowerError(f"no route to host {host}: {error}") from None
    return LOOPBACK, interface_towards(LOOPBACK)


def reachable_address(environment: ClusterEnvironment) -> str:
    """Return the address of this machine at which other ranks reach rank 0."""
    if environment.one_machine:
        return LOOPBACK
    interface = os.environ.get(INTERFACE)
    if interface:
        return store_address(interface, [])[0]
    host = environment.address
    try:
        address = resolve(host) if host else LOOPBACK
        # A machine may resolve its own name to a loopback address.
        is_loopback = ipaddress.ip_address(address).is_loopback
        if is_local(address) and (not is_loopback or host == "localhost"):
            return address
    except TowerError:
        pass
    try:
        return source_address(_REMOTE)
    except OSError as error:
        raise TowerError(
            "cannot tell which network connects the ranks "
            f"({error.strerror}): set {INTERFACE} to the name of its "
            "interface."
        ) from None


def listen_address(address: str) -> str:
    """Return the address to listen at, to be reached at another; empty: all."""
    try:
        return resolve(address) if is_local(address) else ""
    except TowerError:
        return ""


def reserve_port(host: str, stack: contextlib.ExitStack) -> str:
    """Reserve a free port of an address of this machine, until ``stack`` ends.

    TensorFlow's server can listen on it meanwhile, and no other process is
    given it.
    """
    holder = stack.enter_context(socket.socket())
    # TensorFlow sets the same option. With it on both sides, one socket may
    # listen on a port to which another is only bound.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return f"{host}:{holder.getsockname()[1]}"
