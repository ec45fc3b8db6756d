"""TensorFlow servers that accept connections at a single address only.

TensorFlow's server listens on every interface, and authenticates nobody. It
has no option for an address, and a listening socket cannot be bound again.
Binding it to a network interface would refuse processes on this machine that
connect to its network address. So a filter in the kernel drops packets to any
other address.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator

import psutil

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import liveness
from keras_towers.jobs.rendezvous.network import (
    copies_of,
    is_local_address,
    own_sockets,
)

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# From linux/filter.h; Python's socket module has none of these.
_SO_ATTACH_FILTER = 26
_LOAD_BYTE = 0x30
_LOAD_WORD = 0x20
_SHIFT_RIGHT = 0x74
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_IP_HEADER = 0xFFF00000
_DESTINATION = {4: 16, 6: 24}
_ALL_BYTES = 0xFFFFFFFF
# Where the ``tcp_info`` of a socket that listens has the connections that wait.
_WAITING_AT = 24


@contextlib.contextmanager
def reachable_only_at(address: str) -> Iterator[None]:
    """Make a server started inside this block reachable at one address only.

    It stays reachable at all addresses of this machine if the given address is
    not one of them (as behind a load balancer), is a name that resolves to a
    loopback address here, or is 0.0.0.0.
    """
    check_can_listen(address)
    yield
    host, _, port = address.rpartition(":")
    allowed = _local_addresses(host.strip("[]"))
    program = b"".join(map(_accept_destination, allowed)) + _bpf(_RETURN)
    failure: OSError | None = None
    for end in _ends(int(port)):
        # gRPC's own limit would close connections over a link that recovers.
        end.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            round(1000 * settings.LOST_S),
        )
        try:
            if allowed:
                _attach_filter(end, program)
        except OSError as error:
            failure = error
    if failure is not None:
        logger.warning(
            "the server at %s can be reached at all addresses of this machine, "
            "since the kernel accepts no socket filter (%s): have a firewall "
            "close port %s to other machines.",
            address,
            failure.strerror,
            port,
        )


def check_can_listen(address: str) -> None:
    """Check that a server can listen at an address."""
    host, _, port = address.rpartition(":")
    addresses = _local_addresses(host.strip("[]"))
    for local_address in addresses or [ipaddress.IPv4Address(0)]:
        _check_free(local_address, int(port), address)


def _local_addresses(host: str) -> list[_Address]:
    """Return the addresses by which processes here reach a local host.

    Empty if other machines may resolve the host's name to another address.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    names = {str(entry[4][0]).partition("%")[0] for entry in entries}
    addresses = [ipaddress.ip_address(name) for name in sorted(names)]
    by_name = host not in {"localhost", *names}
    if by_name and any(address.is_loopback for address in addresses):
        return []
    if any(address.is_unspecified for address in addresses):
        return []
    return [address for address in addresses if is_local_address(str(address))]


def _check_free(address: _Address, port: int, name: str) -> None:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family) as probe:
        # As TensorFlow's server does: connections of a server that has ended
        # must not count as using the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), port))
        except OSError as error:
            why = (
                "it is in use by another process. End that process"
                if error.errno == errno.EADDRINUSE
                else f"{error.strerror}. Get permission"
            )
            raise TowerError(
                f"cannot listen on {name}, the address of this process: {why}, "
                "or give this task another port."
            ) from None


def _ends(port: int) -> Iterator[socket.socket]:
    """Yield copies of this process's sockets at a port that it listens at.

    Listening sockets come first: sockets that they accept later inherit their
    options. Then come connections that were accepted before.
    """

    def copies(status: str) -> list[socket.socket]:
        ends = own_sockets(status)
        return copies_of((e for e in ends if e.laddr.port == port), stack)

    with contextlib.ExitStack() as stack:
        listeners = copies(psutil.CONN_LISTEN)
        yield from listeners
        for _ in liveness.wait_loop(settings.TASK_ANSWER_S, settings.POLL_S):
            if not any(map(_number_waiting, listeners)):
                break
        yield from copies(psutil.CONN_ESTABLISHED)


def _number_waiting(listener: socket.socket) -> int:
    """Return the number of connections that the server has yet to accept."""
    size = _WAITING_AT + struct.calcsize("I")
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return struct.unpack_from("I", info, _WAITING_AT)[0]


def _attach_filter(listener: socket.socket, program: bytes) -> None:
    """Attach a packet filter to a socket and the connections it accepts."""
    memory = ctypes.create_string_buffer(program, len(program))
    count = len(program) // len(_bpf(_RETURN))
    description = struct.pack("HP", count, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)


def _accept_destination(address: _Address) -> bytes:
    """Return filter instructions that accept packets to an address.

    Packets to any other address jump to the instruction after these.
    """
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    remaining = 2 * len(words) + 1
    # The version is the upper half of the first byte.
    program = _bpf(_LOAD_BYTE, _IP_HEADER) + _bpf(_SHIFT_RIGHT, 4)
    program += _bpf(_JUMP_IF_EQUAL, address.version, jump_if_not=remaining)
    offset = _IP_HEADER + _DESTINATION[address.version]
    for word in words:
        remaining -= 2
        program += _bpf(_LOAD_WORD, offset)
        program += _bpf(_JUMP_IF_EQUAL, word, jump_if_not=remaining)
        offset += 4
    return program + _bpf(_RETURN, _ALL_BYTES)


def _bpf(operation: int, operand: int = 0, jump_if_not: int = 0) -> bytes:
    """Return one instruction of the Berkeley Packet Filter."""
    return struct.pack("HBBI", operation, 0, jump_if_not, operand)
