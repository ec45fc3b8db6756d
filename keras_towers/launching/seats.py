"""Which place each rank gets, and the variables that tell Horovod of it."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_towers.cores import usable_cores
from keras_towers.errors import TowerError
from keras_towers.launching.agent import interface_towards
from keras_towers.launching.invitation import Invitation
from keras_towers.meeting.addresses import INTERFACE
from keras_towers.meeting.slots import Slot
from keras_towers.meeting.variables import job_environment, slot_environment


@dataclasses.dataclass(frozen=True)
class Guest:
    """A rank that has come.

    Attributes:
        host: tells its machine from others.
        address: its own, on the way to rank 0.
        cores: those that it may use.
        nonce: tells it from the same rank of an earlier job.
    """

    host: str
    address: str
    cores: list[int]
    nonce: str


def introduce(address: str, nonce: str = "") -> Guest:
    """This process as a guest.

    Args:
        address: its own, on the way to rank 0.
        nonce: what it is to be known by.
    """
    # Machines may have the same name, containers of a machine the same boot.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return Guest(
        host=f"{socket.gethostname()}-{boot[:8]}",
        address=address,
        cores=sorted(os.sched_getaffinity(0)),
        nonce=nonce,
    )


def seats(
    guests: Sequence[Guest], plan: Sequence[Slot]
) -> list[dict[str, Any]]:
    """What each rank is told of its place.

    Args:
        guests: by rank.
        plan: their places.
    """
    return [
        {
            "nonce": guest.nonce,
            "slot": dataclasses.asdict(slot),
            "sharing": sum(
                (other.host, other.cores) == (guest.host, guest.cores)
                for other in guests
            ),
        }
        for guest, slot in zip(guests, plan, strict=True)
    ]


def variables(
    point: Invitation, seat: dict[str, Any], towards: str
) -> dict[str, str]:
    """The environment of a rank.

    Args:
        point: rank 0, as this rank reaches it.
        seat: what rank 0 says of this rank.
        towards: an address of another machine, if there is one.

    Raises:
        TowerError: a variable that the user has set is not understood.
        OSError: there is no interface with a route there.
    """
    slot = Slot(**seat["slot"])
    set_by_user = os.environ.get(INTERFACE)
    found = {
        **job_environment(
            rendezvous=point.address,
            port=point.port,
            secret=point.secret,
            interface=None if set_by_user else interface_towards(towards),
            stall_warning_s=seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 30),
            stall_shutdown_s=seconds(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 600
            ),
            seed=None,
            elastic=False,
        ),
        **slot_environment(slot),
    }
    if slot.local_size > 1:
        # A launcher may have given each rank cores of its own.
        threads = str(max(1, usable_cores() // seat["sharing"]))
        for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
            found.setdefault(name, os.environ.get(name, threads))
    return found


def seconds(name: str, default: int) -> int:
    """A variable with a number of seconds.

    Raises:
        TowerError: it is none.
    """
    text = os.environ.get(name, "")
    try:
        return round(float(text)) if text else default
    except ValueError:
        raise TowerError(f"{name} is {text!r}: give seconds.") from None
