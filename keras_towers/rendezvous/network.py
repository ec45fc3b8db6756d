"""Addresses of this machine and of others."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable

import psutil

from keras_towers import settings
from keras_towers.agent import interface_towards
from keras_towers.errors import TowerError
from keras_towers.rendezvous.launchers import ClusterEnvironment

LOOPBACK = "127.0.0.1"
INTERFACE = "HOROVOD_GLOO_IFACE"
# Of documentation: to be asked for the way there, not to be reached.
_ELSEWHERE = "192.0.2.1"


def resolve(host: str) -> str:
    """The IPv4 address of a host."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise TowerError(f"unknown host {host}: {error}") from None


def is_local(host: str) -> bool:
    """Whether a host is this machine."""
    address = resolve(host)
    return ipaddress.ip_address(address).is_loopback or is_own(address)


def is_own(address: str) -> bool:
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
    return _why_not(address) is None


def refuses(address: str) -> bool:
    """Whether the host of a ``host:port`` is up but refuses connections."""
    return isinstance(_why_not(address), ConnectionRefusedError)


def _why_not(address: str) -> OSError | None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1) as it:
            # The kernel may give the caller the very port that nobody has.
            alone = it.getsockname() == it.getpeername()
            return ConnectionRefusedError() if alone else None
    except OSError as error:
        return error


def answers(address: str) -> bool:
    """Whether a task of TensorFlow's runtime at ``host:port`` answers.

    Its threads do, whatever Python does there; for a process that was stopped
    the kernel would still accept connections. No proxy knows the job's hosts.
    """
    import grpc

    direct = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, direct) as channel:
        ask = channel.unary_unary("/tensorflow.WorkerService/GetStatus")
        try:
            ask(b"", timeout=settings.TASK_ANSWER_S)
        except grpc.RpcError:
            return False
    return True


def own_address_towards(address: str) -> str:
    """The address of this machine on the route to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, only looks up a route.
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def meeting_point(
    interface: str | None, remote: Iterable[str]
) -> tuple[str, str | None]:
    """The rendezvous address, and the interface of each rank, if known."""
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
            return own_address_towards(resolve(host)), None
        except OSError as error:
            raise TowerError(f"no route to host {host}: {error}") from None
    return LOOPBACK, interface_towards(LOOPBACK)


def own_address(environment: ClusterEnvironment) -> str:
    """The address of this machine at which the others can reach rank 0."""
    if environment.one_machine:
        return LOOPBACK
    interface = os.environ.get(INTERFACE)
    if interface:
        return meeting_point(interface, [])[0]
    host = environment.address
    try:
        address = resolve(host) if host else LOOPBACK
        # A machine may know its own name as one of its loopback.
        only_here = ipaddress.ip_address(address).is_loopback
        if is_local(address) and (not only_here or host == "localhost"):
            return address
    except TowerError:
        pass
    try:
        return own_address_towards(_ELSEWHERE)
    except OSError as error:
        raise TowerError(
            "cannot tell which network connects the ranks "
            f"({error.strerror}): set {INTERFACE} to the name of its "
            "interface."
        ) from None


def bound_to(address: str) -> str:
    """An address of this machine to listen at; empty for all of them."""
    try:
        return resolve(address) if is_local(address) else ""
    except TowerError:
        return ""
