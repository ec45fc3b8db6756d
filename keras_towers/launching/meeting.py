"""How ranks meet that another launcher has started.

Rank 0 opens a rendezvous server in its own process, and every rank introduces
itself there. When all have come, rank 0 says who has which place, and each sets
the variables with which ``keras-towers run`` would have started it.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.launching.invitation import (
    FOLDER,
    POINT,
    Invitation,
    Letter,
    given,
)
from keras_towers.launching.rendezvous import RendezvousServer
from keras_towers.launching.seats import (
    Guest,
    introduce,
    seats,
    seconds,
    variables,
)
from keras_towers.meeting import environments
from keras_towers.meeting.addresses import (
    LOOPBACK,
    bound_to,
    own_address,
    own_address_towards,
)
from keras_towers.meeting.environments import ClusterEnvironment
from keras_towers.meeting.environments.base import SIZE
from keras_towers.meeting.slots import slots
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
# Rank 0 is not there yet; or it was of an earlier job, and is gone, and by now
# anybody may listen on its port.
_NOBODY = (OSError, http.client.HTTPException, ValueError)


def join() -> None:
    """Meet the others of this job, if a launcher other than ours started it.

    Raises:
        TowerError: ranks have not come in time, or it is not known where they
            meet.
    """
    member = environments.detect()
    if member is None or member.placed or member.alone:
        return
    if member.size is None:
        raise TowerError(
            f"{member.name} made this process rank {member.rank} and does "
            f"not say of how many: set {SIZE} to the number of "
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
            seconds(TIMEOUT, _TIMEOUT_S),
        )
    )


def _receive(
    member: ClusterEnvironment,
    size: int,
    point: Invitation | None,
    letter: Letter | None,
    wait_s: float,
) -> dict[str, str]:
    """Wait as rank 0 for all others, and tell them their places."""
    point = point or Invitation(own_address(member), 0, new_secret())
    bound = bound_to(point.address)
    server = RendezvousServer(bound, point.secret)
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
    guests = {0: introduce(own.address)}
    try:
        if letter:
            letter.write(point)
        for late_s in _tries(wait_s):
            # All of them each time: one may have ended and been started again.
            for rank in range(1, size):
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
    plan = slots([guest.host for guest in everyone])
    seated = seats(everyone, plan)
    server.init(plan)
    server.put(_PLAN, _signed(point.secret, {"seats": seated}))
    abroad = [g.address for g in everyone if g.host != everyone[0].host]
    return variables(own, seated[0], next(iter(abroad), own.address))


def _come(
    member: ClusterEnvironment,
    size: int,
    point: Invitation | None,
    letter: Letter | None,
    wait_s: float,
) -> dict[str, str]:
    """Introduce this rank to rank 0, and wait for a place."""
    last = "there is no such file"
    nonce = secrets.token_hex(8)
    found = point
    heard = [time.monotonic()]
    # As long as rank 0 answers, that one decides when it has been too long.
    for late_s in _tries(wait_s, heard):
        # Rank 0 removes the letter when all have come.
        found = (letter and letter.read()) or found
        if found:
            last = f"{found.address}:{found.port} "
            try:
                plan, found = _ask(found, member.rank, nonce)
            except _NOBODY as error:
                plan = {}
                last += f"did not answer as rank 0 does: {error}"
            else:
                if not plan:
                    heard.append(time.monotonic())
                last += "is in a job of others" if plan else "waits for others"
            if "failed" in plan:
                raise TowerError(plan["failed"])
            seat = plan["seats"][member.rank] if plan else {}
            if seat.get("nonce") == nonce:
                return variables(found, seat, found.address)
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
    guest = introduce(own_address_towards(point.address), nonce)
    server.put(_guest(rank), json.dumps(dataclasses.asdict(guest)).encode())
    answer = json.loads(server.get(_PLAN) or "{}")
    if not answer:
        return {}, point
    plan = str(answer.get("plan"))
    if not same(str(answer.get("signature")), _signature(point.secret, plan)):
        raise ValueError("the signature is wrong")
    return json.loads(plan), point


def _missing(
    member: ClusterEnvironment,
    size: int,
    guests: dict[int, Guest],
    waited_s: float,
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


def _tries(limit_s: float, heard: Sequence[float] = ()) -> Iterator[float]:
    """Loop with pauses until a limit; now and then, say how late it is.

    Args:
        limit_s: seconds from the beginning, or from what was heard last.
        heard: when something was heard; may grow meanwhile.
    """
    begun = time.monotonic()
    warned = 0.0
    while time.monotonic() - (heard[-1] if heard else begun) < limit_s:
        waited_s = time.monotonic() - begun
        late = waited_s >= warned + _WARNING_S
        warned = waited_s if late else warned
        yield waited_s if late else 0.0
        time.sleep(_POLL_S)
