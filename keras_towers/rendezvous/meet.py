"""The rendezvous of ranks that another launcher has started.

Rank 0 opens the job's store in a process beside it, and every rank introduces
itself there; its address is in a private file, or given by the user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from keras_towers import agent, settings
from keras_towers.errors import TowerError
from keras_towers.rendezvous import helper_process, launchers, store, watch
from keras_towers.rendezvous.helper_process import (
    INTRODUCTION,
    MISSING,
    PLACE,
)
from keras_towers.rendezvous.hosts import NO_PLACEMENT, RankPlacement
from keras_towers.rendezvous.launchers import ClusterEnvironment
from keras_towers.rendezvous.liveness import waiting
from keras_towers.rendezvous.network import (
    LOOPBACK,
    bound_to,
    own_address,
    own_address_towards,
)
from keras_towers.rendezvous.rank_environment import (
    is_elastic,
    job_environment,
    process_environment,
    seconds,
)
from keras_towers.rendezvous.store import Endpoint, FileStore, StoreClient
from keras_towers.settings import (
    RENDEZVOUS,
    RENDEZVOUS_FOLDER,
    RENDEZVOUS_TIMEOUT,
    SECRET,
    SIZE,
)

logger: logging.Logger = logging.getLogger("keras_towers")


_LEAST_SECRET = 16
# Rank 0 is not there yet; or it was of an earlier job, and is gone, and by now
# anybody may listen on its port.
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


def join() -> None:
    """Meet the other ranks, if a launcher other than ours started the job."""
    environment = launchers.detect()
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
    meeting = Meeting(environment)
    os.environ.update(
        meeting.of_rank_0() if environment.rank == 0 else meeting.with_rank_0()
    )


def take_place() -> None:
    """Wait for all workers of an elastic job, and take a rank.

    To be called before Horovod connects for the first time in a process, whose
    rank may be out of date: others that died meanwhile are not waited for.
    Later Horovod asks by itself.
    """
    server = store.from_environment()
    if server is None or not is_elastic():
        return
    host, local_rank = (
        os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "LOCAL_RANK")
    )
    answer = server.read("rank_and_size", f"{host}:{local_rank}", hold_s=None)
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


class Meeting:
    """The way of one rank to its place in the job."""

    def __init__(self, environment: ClusterEnvironment):
        self._rank, self._size = environment.rank, environment.size or 0
        self._environment = environment
        self._given = given_endpoint()
        self._file = None if self._given else RendezvousFile(environment)
        self._limit_s = seconds(
            RENDEZVOUS_TIMEOUT, settings.RENDEZVOUS_TIMEOUT_S
        )

    def of_rank_0(self) -> dict[str, str]:
        """Open the store as rank 0, and wait there for all other ranks."""
        address = (
            self._given.address
            if self._given
            else own_address(self._environment)
        )
        bound = bound_to(address)
        given = self._given or Endpoint(address, 0, "")
        try:
            helper, own = helper_process.start_store(
                dataclasses.replace(given, address=bound), self._size
            )
        except OSError as error:
            raise TowerError(
                f"rank 0 cannot listen on port {given.port} of "
                f"{bound or 'this machine'}: {error.strerror}."
            ) from None
        # It may know itself under another address than the others do.
        own = dataclasses.replace(own, address=bound or LOOPBACK)
        try:
            if self._file:
                self._file.write(dataclasses.replace(own, address=address))
            return self._take_part(lambda: own)
        except TimeoutError:
            store = own.client()
            text = (
                f"{self._environment} has waited {self._limit_s:.0f} s: "
                f"{_missing(store)}. Has it ended, or not reached this line? "
                f"{RENDEZVOUS_TIMEOUT} sets the seconds."
            )
            for rank in range(self._size):
                store.put(f"{PLACE}-{rank}", {"failed": text})
            time.sleep(settings.LAST_WORDS_S)
            helper_process.stop(helper)
            raise TowerError(text) from None
        except BaseException:
            helper_process.stop(helper)
            raise
        finally:
            if self._file:
                self._file.remove()

    def with_rank_0(self) -> dict[str, str]:
        """Find the store of rank 0, and wait there for all other ranks."""
        how = f"at {RENDEZVOUS}={os.environ.get(RENDEZVOUS)}"
        if self._file:
            how = (
                f"in the file {self._file.path}. If the machines do not share "
                f"its folder, set {RENDEZVOUS_FOLDER} to one that they share, "
                f"or {RENDEZVOUS} and {SECRET}"
            )
        find = self._file.read if self._file else lambda: self._given
        try:
            return self._take_part(find)
        except TimeoutError as late:
            raise TowerError(
                f"{self._environment} waited {self._limit_s:.0f} s for rank 0, "
                f"expected {how}. The last attempt: {late}. "
                f"{RENDEZVOUS_TIMEOUT} sets the seconds."
            ) from None

    def _take_part(self, find: Callable[[], Endpoint | None]) -> dict[str, str]:
        """Introduce this rank at the store, and wait for its place in the job.

        Args:
            find: returns the store; None if it is not there, or not any more.

        Raises:
            TimeoutError: the limit has passed; it says how far this rank came.
        """
        nonce, found, last = secrets.token_hex(8), None, "there is no such file"
        answered = [time.monotonic()]
        for late_s in waiting(self._limit_s, settings.NETWORK_POLL_S, answered):
            # Rank 0 removes the file when all have come.
            found = find() or found
            if found:
                last = f"{found.address}:{found.port}"
                try:
                    address = socket.gethostbyname(found.address)
                    found = dataclasses.replace(found, address=address)
                    client, own = found.client(), own_address_towards(address)
                    introduction = _introduction(own, nonce)
                    client.put(f"{INTRODUCTION}-{self._rank}", introduction)
                    key = f"{PLACE}-{self._rank}"
                    place = client.get(key, settings.HOLD_S) or {}
                    if late_s and not place:
                        last = _missing(client)
                except _NO_ANSWER as error:
                    last += f" did not answer as rank 0 does: {error}"
                else:
                    if place.get("nonce") == nonce:
                        return _variables(found, place)
                    if "failed" in place:
                        raise TowerError(place["failed"])
                    if place:
                        last += " is in a job of others"
                    elif self._rank > 0:
                        # Rank 0, which answers, decides when it was too long.
                        answered.append(time.monotonic())
            if late_s:
                logger.warning(
                    "%s has waited %.0f s: %s.", self._environment, late_s, last
                )
        raise TimeoutError(last)


def _missing(store: StoreClient) -> str:
    """Which ranks have not come."""
    ranks = store.get(MISSING)
    if not ranks:
        return "all ranks have come, and are about to get their places"
    names = ", ".join(map(str, ranks))
    return (
        f"rank {names} has not come"
        if len(ranks) == 1
        else f"ranks {names} have not come"
    )


def _introduction(address: str, nonce: str) -> dict[str, Any]:
    """What this rank tells of itself."""
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


def _variables(endpoint: Endpoint, place: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a rank, from its place."""
    slot = RankPlacement(**place["slot"])
    watch.rank0_name = place["rank0_name"]
    if slot.rank > 0:
        helper_process.start_heartbeat(endpoint, slot.rank)
    common = process_environment(
        seconds(settings.STALL_WARNING, settings.STALL_WARNING_S),
        seconds(settings.STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S),
    )
    environment = {
        **os.environ,
        **job_environment(endpoint, common, None),
        **slot.environment,
    }
    # Rank 0 reaches its own store on another way than ranks elsewhere.
    elsewhere = place["elsewhere"] if slot.rank == 0 else None
    towards = elsewhere or endpoint.address
    # No agent does so before the process starts.
    agent.set_up_host(environment, towards, place["sharing"])
    return environment
