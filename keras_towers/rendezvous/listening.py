"""TensorFlow servers that accept connections to a single address only.

TensorFlow's server listens on every interface, and authenticates nobody. It
has no option for an address, and a socket that listens cannot be bound again.
Binding it to a network interface would refuse processes of this machine that
connect to its network address. So a filter in the kernel drops what comes to
another address.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator

import psutil

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.rendezvous.network import is_own

logger: logging.Logger = logging.getLogger("keras_towers")

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


@contextlib.contextmanager
def only_at(address: str) -> Iterator[None]:
    """Make a server started inside this block reachable at one address only.

    If this machine has no such address, as behind a load balancer, or knows its
    own name as one of its loopback, the server can be reached at all of them;
    with 0.0.0.0, too.
    """
    check(address)
    yield
    host, _, port = address.rpartition(":")
    listeners = [*_listeners(int(port))]
    for listener in listeners:
        # The connections that it accepts inherit this. By gRPC's own limit, of
        # 20 s, those of a link that heals would be gone.
        listener.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            round(1000 * settings.LOST_S),
        )
    own = _own_addresses(host.strip("[]"))
    program = b"".join(_accept(one) for one in own) + _code(_RETURN)
    try:
        for listener in listeners if own else ():
            _attach(listener, program)
    except OSError as error:
        logger.warning(
            "the server at %s can be reached at all addresses of this machine, "
            "since the kernel takes no socket filter (%s): have a firewall "
            "close port %s to others.",
            address,
            error.strerror,
            port,
        )
    finally:
        for listener in listeners:
            listener.close()


def check(address: str) -> None:
    """Check that a server can listen at an address."""
    host, _, port = address.rpartition(":")
    own = _own_addresses(host.strip("[]"))
    for one in own or [ipaddress.IPv4Address(0)]:
        _check_free(one, int(port), address)


def _own_addresses(host: str) -> list[_Address]:
    """The addresses of a host; empty if others may reach it by another one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    names = {str(entry[4][0]).partition("%")[0] for entry in found}
    addresses = [ipaddress.ip_address(name) for name in sorted(names)]
    by_name = host not in {"localhost", *names}
    if by_name and any(address.is_loopback for address in addresses):
        return []
    if any(address.is_unspecified for address in addresses):
        return []
    return [address for address in addresses if is_own(str(address))]


def _check_free(address: _Address, port: int, name: str) -> None:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family) as probe:
        # As TensorFlow's server does, so that connections of one that has ended
        # are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), port))
        except OSError as error:
            why = (
                "it is in use by another process. End that one"
                if error.errno == errno.EADDRINUSE
                else f"{error.strerror}. Get permission"
            )
            raise TowerError(
                f"cannot listen on {name}, the address of this process: {why}, "
                "or give this task another port."
            ) from None


def _listeners(port: int) -> Iterator[socket.socket]:
    """This process's sockets that listen at a port."""
    for found in psutil.Process().net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port:
            yield socket.socket(fileno=os.dup(found.fd))


def _attach(listener: socket.socket, program: bytes) -> None:
    """Attach a packet filter to a socket and the connections it accepts."""
    memory = ctypes.create_string_buffer(program, len(program))
    count = len(program) // len(_code(_RETURN))
    description = struct.pack("HP", count, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)


def _accept(address: _Address) -> bytes:
    """Filter instructions that accept packets to an address.

    Others go on behind them: a jump skips what is left of the instructions.
    """
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    left = 2 * len(words) + 1
    # The version is the upper half of the first byte.
    program = _code(_LOAD_BYTE, _IP_HEADER) + _code(_SHIFT_RIGHT, 4)
    program += _code(_JUMP_IF_EQUAL, address.version, otherwise=left)
    place = _IP_HEADER + _DESTINATION[address.version]
    for word in words:
        left -= 2
        program += _code(_LOAD_WORD, place)
        program += _code(_JUMP_IF_EQUAL, word, otherwise=left)
        place += 4
    return program + _code(_RETURN, _ALL_BYTES)


def _code(operation: int, operand: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", operation, 0, otherwise, operand)
