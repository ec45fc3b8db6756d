"""The rendezvous of ranks that another launcher has started.

Rank 0 opens the job's store in a process beside it, and every rank introduces
itself there; its address is in a private file, or given by the user.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import http.client
import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.rendezvous import environments, store, watch
from keras_towers.rendezvous.environment_variables import (
    is_elastic,
    process_environment,
    rank_environment,
    seconds,
)
from keras_towers.rendezvous.environments import ClusterEnvironment
from keras_towers.rendezvous.heartbeat import HeartbeatProcess
from keras_towers.rendezvous.hosts import (
    NO_PLACEMENT,
    RankPlacement,
    place_ranks,
)
from keras_towers.rendezvous.liveness import waiting
from keras_towers.rendezvous.network import (
    LOOPBACK,
    bound_to,
    own_address,
    own_address_towards,
)
from keras_towers.rendezvous.store import Endpoint, FileStore
from keras_towers.settings import (
    RENDEZVOUS,
    RENDEZVOUS_FOLDER,
    RENDEZVOUS_TIMEOUT,
    SECRET,
    SIZE,
)

logger: logging.Logger = logging.getLogger("keras_towers")


_LEAST_SECRET = 16
# Keys of the store: who has come, and with the rank behind it each of them.
_PLAN, _GUEST = "plan", "guest"
# Rank 0 is not there yet; or it was of an earlier job, and is gone, and by now
# anybody may listen on its port.
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


@functools.cache
def _heartbeat() -> HeartbeatProcess:
    """The heartbeat process of this rank, which ends with it."""
    return HeartbeatProcess()


def join() -> None:
    """Meet the other ranks, if a launcher other than ours started the job."""
    environment = environments.detect()
    if (
        environment is None
        or environment.horovod_reads_variables
        or environment.alone
    ):
        return
    if environment.size is None:
        raise TowerError(
            f"{environment.name} made this process rank {environment.rank} and "
            f"does not say of how many: set {SIZE} to the number of "
            "processes, or to 1 if each is to train a model of its own."
        )
    if environment.rank >= environment.size:
        raise TowerError(f"there cannot be a {environment}.")
    endpoint = given_endpoint()
    file = None if endpoint else RendezvousFile(environment)
    meet = _meet_as_rank_0 if environment.rank == 0 else _meet_rank_0
    os.environ.update(
        meet(
            environment,
            endpoint,
            file,
            seconds(RENDEZVOUS_TIMEOUT, settings.RENDEZVOUS_TIMEOUT_S),
        )
    )


def take_place() -> None:
    """Wait for all workers of an elastic job, and take a rank.

    To be called before Horovod connects for the first time in a process, whose
    rank may be out of date: others that died meanwhile are not waited for.
    Later Horovod asks by itself.
    """
    server = store.from_environment()
    if server is None or not server.signed or not is_elastic():
        return
    host, local_rank = (
        os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "LOCAL_RANK")
    )
    answer = server.read("rank_and_size", f"{host}:{local_rank}")
    encoded = answer.decode() if answer else NO_PLACEMENT
    slot = RankPlacement.decode(host, encoded)
    if slot.rank < 0:
        raise TowerError("the job has continued without this worker.")
    os.environ.update(slot.environment)


def given_endpoint() -> Endpoint | None:
    """The address and secret set by the user, or None."""
    point = os.environ.get(RENDEZVOUS)
    if not point:
        return None
    address, _, port = point.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TowerError(
            f"{RENDEZVOUS} is {point!r}: give host:port of rank 0."
        )
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST_SECRET:
        raise TowerError(
            f"{RENDEZVOUS} needs {SECRET} too, the same on all ranks and known "
            f"to nobody else: at least {_LEAST_SECRET} characters, such as "
            "those that `openssl rand -hex 32` prints."
        )
    return Endpoint(address, int(port), secret)


class RendezvousFile:
    """The private file with the address of rank 0 and the job's secret."""

    def __init__(self, environment: ClusterEnvironment):
        base = Path(
            os.environ.get(RENDEZVOUS_FOLDER)
            or (
                tempfile.gettempdir()
                if environment.one_machine
                else platformdirs.user_cache_path(
                    "keras-towers", appauthor=False
                )
            )
        )
        folder = base / f"keras_towers-{os.getuid()}"
        name = re.sub(r"\W+", "-", environment.name)
        digest = hashlib.sha256(environment.identity().encode()).hexdigest()
        self._key = f"{name}-{digest[:32]}"
        self.path: Path = folder / self._key
        with self._usable():
            self._store = FileStore(folder)
        self._written: Any = None

    def write(self, endpoint: Endpoint) -> None:
        """Write the file, replacing one of an earlier job."""
        self._written = dataclasses.asdict(endpoint)
        with self._usable():
            self._store.put(self._key, self._written)

    def read(self) -> Endpoint | None:
        """Read the file; None as long as it does not exist."""
        with self._usable():
            found = self._store.get(self._key)
        try:
            return Endpoint(**found)
        except TypeError:  # Nothing, or not of this version.
            return None

    def remove(self) -> None:
        """Remove the file, unless another job has replaced it."""
        self._store.remove(self._key, self._written)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TowerError(
                f"ranks meet through the file {self.path}, which cannot be "
                f"used ({error.strerror}): set {RENDEZVOUS_FOLDER} to a "
                "folder that all machines of the job share."
            ) from None


def _meet_as_rank_0(
    environment: ClusterEnvironment,
    endpoint: Endpoint | None,
    file: RendezvousFile | None,
    wait_s: float,
) -> dict[str, str]:
    """As rank 0, wait for all other ranks, and send them the plan."""
    ranks = range(environment.size or 0)
    address = endpoint.address if endpoint else own_address(environment)
    bound = bound_to(address)
    port = endpoint.port if endpoint else 0
    beside = _heartbeat()
    try:
        own = beside.serve(
            Endpoint(bound, port, endpoint.secret if endpoint else "")
        )
    except OSError as error:
        raise TowerError(
            f"rank 0 cannot listen on port {port} of "
            f"{bound or 'this machine'}: {error.strerror}."
        ) from None
    # It may know itself under another address than the others do.
    own = dataclasses.replace(own, address=bound or LOOPBACK)
    me = _introduction(own.address)
    guests: dict[int, Any] = {}
    try:
        if file:
            file.write(dataclasses.replace(own, address=address))
        for late_s in waiting(wait_s, settings.NETWORK_POLL_S):
            # All of them each time: one may have ended and been started again.
            guests = {**beside.by_rank(_GUEST, ranks), 0: me}
            if len(guests) == len(ranks):
                break
            if late_s:
                logger.warning("%s", _missing(environment, guests, late_s))
        else:
            text = (
                f"{_missing(environment, guests, wait_s)} Has it ended, or not "
                f"reached this line? {RENDEZVOUS_TIMEOUT} sets the seconds."
            )
            beside.publish(_PLAN, [{"failed": text}] * len(ranks))
            time.sleep(settings.LAST_WORDS_S)
            raise TowerError(text)
    except BaseException:
        beside.stop()
        raise
    finally:
        if file:
            file.remove()
    everyone = [guests[rank] for rank in ranks]
    plans = _plans(everyone)
    hosts = [guest["host"] for guest in everyone]
    names = [f"rank {rank} on {everyone[rank]['name']}" for rank in ranks]
    beside.begin(hosts, names)
    beside.publish(_PLAN, plans)
    abroad = [g["address"] for g in everyone if g["host"] != hosts[0]]
    return _variables(own, plans[0], next(iter(abroad), own.address))


def _meet_rank_0(
    environment: ClusterEnvironment,
    endpoint: Endpoint | None,
    file: RendezvousFile | None,
    wait_s: float,
) -> dict[str, str]:
    """Introduce this rank to rank 0, and wait for all others."""
    last = "there is no such file"
    nonce = secrets.token_hex(8)
    found = endpoint
    answered = [time.monotonic()]
    rank = environment.rank
    # As long as rank 0 answers, that one decides when it has been too long.
    for late_s in waiting(wait_s, settings.NETWORK_POLL_S, answered):
        # Rank 0 removes the file when all have come.
        found = (file and file.read()) or found
        if found:
            last = f"{found.address}:{found.port} "
            plan: dict[str, Any] = {}
            try:
                found = dataclasses.replace(
                    found, address=socket.gethostbyname(found.address)
                )
                client = found.client()
                own = own_address_towards(found.address)
                client.put(f"{_GUEST}-{rank}", _introduction(own, nonce))
                plan = client.get(f"{_PLAN}-{rank}", settings.HOLD_S) or {}
            except _NO_ANSWER as error:
                last += f"did not answer as rank 0 does: {error}"
            else:
                if not plan:
                    answered.append(time.monotonic())
                last += "is in a job of others" if plan else "waits for others"
            if "failed" in plan:
                raise TowerError(plan["failed"])
            if plan.get("nonce") == nonce:
                return _variables(found, plan, found.address)
        if late_s:
            logger.warning(
                "%s has waited %.0f s: %s.", environment, late_s, last
            )
    how = (
        f"in the file {file.path}. If the machines do not share its folder, "
        f"set {RENDEZVOUS_FOLDER} to one that they share, or {RENDEZVOUS} "
        f"and {SECRET}"
        if file
        else f"at {RENDEZVOUS}={os.environ[RENDEZVOUS]}"
    )
    raise TowerError(
        f"{environment} waited {wait_s:.0f} s for rank 0, expected {how}. "
        f"The last attempt: {last}. {RENDEZVOUS_TIMEOUT} sets the seconds."
    )


def _introduction(address: str, nonce: str = "") -> dict[str, Any]:
    """The introduction of this rank to rank 0."""
    # Machines may have the same name, containers of a machine the same boot.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    name = socket.gethostname()
    return {
        "host": f"{name}-{boot[:8]}",
        "name": name,
        "address": address,
        "cores": sorted(os.sched_getaffinity(0)),
        "nonce": nonce,
    }


def _plans(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The plan for each rank, whose size does not grow with the job."""
    # A launcher may have given each rank cores of its own.
    cores = [(guest["host"], *guest["cores"]) for guest in everyone]
    sharing = collections.Counter(cores)
    places = place_ranks([guest["host"] for guest in everyone])
    return [
        {
            "nonce": guest["nonce"],
            "slot": dataclasses.asdict(slot),
            "sharing": sharing[mine],
            "rank0_name": f"rank 0 on {everyone[0]['name']}",
        }
        for guest, slot, mine in zip(everyone, places, cores, strict=True)
    ]


def _variables(
    endpoint: Endpoint, plan: Mapping[str, Any], towards: str
) -> dict[str, str]:
    """The environment of a rank, from its plan."""
    slot = RankPlacement(**plan["slot"])
    watch.rank0_name = plan["rank0_name"]
    _heartbeat().beat(endpoint, slot.rank)
    common = process_environment(
        seconds(settings.STALL_WARNING, settings.STALL_WARNING_S),
        seconds(settings.STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S),
    )
    return rank_environment(endpoint, slot, towards, common, plan["sharing"])


def _missing(
    environment: ClusterEnvironment, guests: dict[int, Any], waited_s: float
) -> str:
    assert environment.size
    absent = sorted(set(range(environment.size)) - guests.keys())
    names = ", ".join(map(str, absent))
    ranks = f"rank {names} has" if len(absent) == 1 else f"ranks {names} have"
    return f"{environment} has waited {waited_s:.0f} s: {ranks} not come."
