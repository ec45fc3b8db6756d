"""Under which address of this machine the other ranks reach it."""

from __future__ import annotations

import ipaddress
import os
import socket

from keras_towers.errors import TowerError
from keras_towers.launching.clusters import Member
from keras_towers.launching.hosts import (
    LOOPBACK,
    is_local,
    meeting_point,
    resolve,
)

INTERFACE = "HOROVOD_GLOO_IFACE"
# Of documentation: to be asked for the way there, not to be reached.
_ELSEWHERE = "192.0.2.1"


def own_address(member: Member) -> str:
    """The address of this machine at which the others can reach rank 0.

    Args:
        member: this process, rank 0.

    Raises:
        TowerError: it is not known, or there is no such interface.
    """
    if member.one_machine:
        return LOOPBACK
    interface = os.environ.get(INTERFACE)
    if interface:
        return meeting_point(interface, [])[0]
    try:
        told = resolve(member.address) if member.address else LOOPBACK
        # A machine may know its own name as one of its loopback.
        only_here = ipaddress.ip_address(told).is_loopback
        if is_local(told) and (not only_here or member.address == "localhost"):
            return told
    except TowerError:
        pass
    try:
        return own_address_towards(_ELSEWHERE)
    except OSError as error:
        raise TowerError(
            "it is not known on which network the ranks reach one another "
            f"({error.strerror}): set {INTERFACE} to the name of its "
            "interface."
        ) from None


def own_address_towards(address: str) -> str:
    """The address of this machine on the way to another one.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, only looks up a route.
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def bound_to(address: str) -> str:
    """Where to listen for those who reach this machine under an address.

    Args:
        address: it may be a name for the others only, such as a service's.

    Returns:
        An address of this machine; empty for all of them.
    """
    try:
        return resolve(address) if is_local(address) else ""
    except TowerError:
        return ""
