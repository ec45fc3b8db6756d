"""How ranks meet that another launcher has started.

Rank 0 opens a rendezvous server in its own process, and every rank introduces
itself there. When all have come, rank 0 says who has which place, and each sets
the variables with which ``keras-towers run`` would have started it.
"""

from __future__ import annotations

import collections
import dataclasses
import http.client
import ipaddress
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_towers.cores import usable_cores
from keras_towers.errors import TowerError
from keras_towers.launch import clusters
from keras_towers.launch.agent import interface_towards
from keras_towers.launch.clusters import Member
from keras_towers.launch.environment import job_environment, slot_environment
from keras_towers.launch.hosts import LOOPBACK, is_local, resolve
from keras_towers.launch.invitation import (
    FOLDER,
    POINT,
    Invitation,
    Letter,
    given,
)
from keras_towers.launch.job import meeting_point
from keras_towers.launch.rendezvous import horovod, rendezvous_server
from keras_towers.rendezvous import (
    SECRET,
    Rendezvous,
    new_secret,
    same,
    sign,
    token,
)

logger: logging.Logger = logging.getLogger("keras_towers")

TIMEOUT = "KERAS_TOWERS_MEETING_TIMEOUT"

_TIMEOUT_S = 600
_WARNING_S = 30.0
_POLL_S = 0.1
# So that all others can read why they wait in vain.
_LAST_WORDS_S = 1.0
_PLAN = "plan"
_INTERFACE = "HOROVOD_GLOO_IFACE"
# Of documentation: to be asked for the way there, not to be reached.
_ELSEWHERE = "192.0.2.1"


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


def join() -> None:
    """Meet the others of this job, if a launcher other than ours started it.

    Raises:
        TowerError: ranks have not come in time, or it is not known where they
            meet.
    """
    member = clusters.member()
    if member is None or member.placed or member.alone:
        return
    if member.size is None:
        raise TowerError(
            f"{member.launcher} made this process rank {member.rank} and does "
            f"not say of how many: set {clusters.SIZE} to the number of "
            "processes, or to 1 if each is to train a model of its own."
        )
    if member.rank >= member.size:
        raise TowerError(f"there cannot be a {member}.")
    point = given()
    meet = _receive if member.rank == 0 else _come
    os.environ.update(
        meet(
            member,
            member.size,
            point,
            None if point else Letter(member),
            _seconds(TIMEOUT, _TIMEOUT_S),
        )
    )


def places(guests: Sequence[Guest]) -> list[Any]:
    """Horovod's ``SlotInfo`` of each rank, wherever the launcher has put it.

    Args:
        guests: by rank.
    """
    slot = horovod("runner.common.util.hosts").SlotInfo
    on_host: dict[str, list[int]] = collections.defaultdict(list)
    for rank, guest in enumerate(guests):
        on_host[guest.host].append(rank)
    found = []
    for rank, guest in enumerate(guests):
        mine = on_host[guest.host]
        local = mine.index(rank)
        # One of each machine that has as many.
        across = [
            ranks[local] for ranks in on_host.values() if len(ranks) > local
        ]
        found.append(
            slot(
                hostname=guest.host,
                rank=rank,
                local_rank=local,
                cross_rank=across.index(rank),
                size=len(guests),
                local_size=len(mine),
                cross_size=len(across),
            )
        )
    return found


def _receive(
    member: Member,
    size: int,
    point: Invitation | None,
    letter: Letter | None,
    wait_s: float,
) -> dict[str, str]:
    """Wait as rank 0 for all others, and tell them their places."""
    point = point or Invitation(_own_address(member), 0, new_secret())
    bound = _bound(point.address)
    server = rendezvous_server(bound, point.secret)
    try:
        port = server.start(port=point.port)
    except OSError as error:
        raise TowerError(
            f"rank 0 cannot listen on port {point.port} of "
            f"{bound or 'this machine'}: {error.strerror}."
        ) from None
    point = dataclasses.replace(point, port=port)
    # It may know itself under another address than the others do.
    own = dataclasses.replace(point, address=bound or LOOPBACK)
    guests = {0: _introduction(own.address)}
    try:
        if letter:
            letter.write(point)
        for late_s in _tries(wait_s):
            for rank in set(range(size)) - guests.keys():
                if said := server.get(_guest(rank)):
                    guests[rank] = Guest(**said)
            if len(guests) == size:
                break
            if late_s:
                logger.warning("%s", _missing(member, size, guests, late_s))
        else:
            text = (
                f"{_missing(member, size, guests, wait_s)} Has it ended, or "
                f"not reached this line? {TIMEOUT} sets the seconds."
            )
            server.put(_PLAN, _signed(point.secret, {"failed": text}))
            time.sleep(_LAST_WORDS_S)
            raise TowerError(text)
    except BaseException:
        server.stop()
        raise
    finally:
        if letter:
            letter.remove()
    everyone = [guests[rank] for rank in range(size)]
    plan = places(everyone)
    server.init(plan)
    seats = [
        {
            "nonce": guest.nonce,
            "slot": dataclasses.asdict(slot),
            "sharing": sum(
                (other.host, other.cores) == (guest.host, guest.cores)
                for other in everyone
            ),
        }
        for guest, slot in zip(everyone, plan, strict=True)
    ]
    server.put(_PLAN, _signed(point.secret, {"seats": seats}))
    abroad = [g.address for g in everyone if g.host != everyone[0].host]
    return _environment(own, seats[0], next(iter(abroad), own.address))


def _come(
    member: Member,
    size: int,
    point: Invitation | None,
    letter: Letter | None,
    wait_s: float,
) -> dict[str, str]:
    """Introduce this rank to rank 0, and wait for a place."""
    last = "there is no such file"
    nonce = secrets.token_hex(8)
    found = point
    for late_s in _tries(wait_s):
        # Rank 0 removes the letter when all have come.
        found = (letter and letter.read()) or found
        if found:
            last = f"{found.address}:{found.port} waits for other ranks, too"
            try:
                plan, found = _ask(found, member.rank, nonce)
            except (OSError, http.client.HTTPException) as error:
                # Not there yet; or not any more, and of an earlier job.
                plan = {}
                last = f"{found.address}:{found.port}: {error}"
            if "failed" in plan:
                raise TowerError(plan["failed"])
            seat = plan["seats"][member.rank] if plan else {}
            if seat.get("nonce") == nonce:
                return _environment(found, seat, found.address)
        if late_s:
            logger.warning("%s has waited %.0f s: %s.", member, late_s, last)
    how = (
        f"by the file {letter.path}. If the machines do not share its folder, "
        f"set {FOLDER} to one that they share, or {POINT} and {SECRET}"
        if letter
        else f"by {POINT}={os.environ[POINT]}"
    )
    raise TowerError(
        f"{member} has waited {wait_s:.0f} s for rank 0, which it was to find "
        f"{how}. The last try: {last}. {TIMEOUT} sets the seconds."
    )


def _ask(
    point: Invitation, rank: int, nonce: str
) -> tuple[dict[str, Any], Invitation]:
    """What rank 0 has decided, nothing as long as it waits for others."""
    point = dataclasses.replace(
        point, address=socket.gethostbyname(point.address)
    )
    server = Rendezvous(
        f"{point.address}:{point.port}/{token(point.secret)}",
        str(point.port),
        point.secret,
    )
    guest = _introduction(_own_address_towards(point.address), nonce)
    server.put(_guest(rank), json.dumps(dataclasses.asdict(guest)).encode())
    answer = json.loads(server.get(_PLAN) or "{}")
    # On the port of an earlier job anybody may listen by now.
    if not answer or not same(
        answer["signature"], _signature(point.secret, answer["plan"])
    ):
        return {}, point
    return json.loads(answer["plan"]), point


def _environment(
    point: Invitation, seat: dict[str, Any], towards: str
) -> dict[str, str]:
    """The variables of a rank.

    Args:
        point: rank 0, as this rank reaches it.
        seat: what rank 0 says of this rank.
        towards: an address of another machine, if there is one.
    """
    slot = horovod("runner.common.util.hosts").SlotInfo(**seat["slot"])
    set_by_user = os.environ.get(_INTERFACE)
    variables = {
        **job_environment(
            rendezvous=point.address,
            port=point.port,
            secret=point.secret,
            interface=None if set_by_user else interface_towards(towards),
            stall_warning_s=_seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 30),
            stall_shutdown_s=_seconds(
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
            variables.setdefault(name, os.environ.get(name, threads))
    return variables


def _introduction(address: str, nonce: str = "") -> Guest:
    # Machines may have the same name, containers of a machine the same boot.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return Guest(
        host=f"{socket.gethostname()}-{boot[:8]}",
        address=address,
        cores=sorted(os.sched_getaffinity(0)),
        nonce=nonce,
    )


def _own_address(member: Member) -> str:
    """The address of this machine at which the others can reach rank 0."""
    if member.one_machine:
        return LOOPBACK
    interface = os.environ.get(_INTERFACE)
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
        return _own_address_towards(_ELSEWHERE)
    except OSError as error:
        raise TowerError(
            "it is not known on which network the ranks reach one another "
            f"({error.strerror}): set {_INTERFACE} to the name of its "
            "interface."
        ) from None


def _own_address_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, only looks up a route.
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _bound(address: str) -> str:
    """Where to listen for those who reach this machine under an address."""
    try:
        return resolve(address) if is_local(address) else ""
    except TowerError:
        return ""  # A name for the others, such as that of a service.


def _missing(
    member: Member, size: int, guests: dict[int, Guest], waited_s: float
) -> str:
    absent = sorted(set(range(size)) - guests.keys())
    names = ", ".join(map(str, absent))
    ranks = f"rank {names} has" if len(absent) == 1 else f"ranks {names} have"
    return f"{member} has waited {waited_s:.0f} s: {ranks} not come."


def _guest(rank: int) -> str:
    return f"guest-{rank}"


def _signed(secret: str, plan: dict[str, Any]) -> dict[str, str]:
    text = json.dumps(plan)
    return {"plan": text, "signature": _signature(secret, text)}


def _signature(secret: str, plan: str) -> str:
    return sign(secret, "PLAN", "", plan.encode())


def _tries(limit_s: float) -> Iterator[float]:
    """Loop with pauses until a limit; now and then, say how late it is."""
    begun = time.monotonic()
    warned = 0.0
    while (waited_s := time.monotonic() - begun) < limit_s:
        late = waited_s >= warned + _WARNING_S
        warned = waited_s if late else warned
        yield waited_s if late else 0.0
        time.sleep(_POLL_S)


def _seconds(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return round(float(text)) if text else default
    except ValueError:
        raise TowerError(f"{name} is {text!r}: give seconds.") from None
