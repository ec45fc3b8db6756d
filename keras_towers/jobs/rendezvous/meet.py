"""The rendezvous of ranks that another launcher has started.

Rank 0 opens the job's store in a helper process, and every rank introduces
itself there. Ranks find the store's address in a private file, unless the user
has set it.

Each rank has such a process (``rank_helper.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.settings import (
    ENV_RENDEZVOUS,
    ENV_RENDEZVOUS_TIMEOUT,
    ENV_SECRET,
    ENV_SIZE,
)
from keras_towers.jobs import agent
from keras_towers.jobs.rendezvous import (
    activity,
    launchers,
    network,
    rank_environment,
)
from keras_towers.jobs.rendezvous.file_store import FileStore
from keras_towers.jobs.rendezvous.hosts import RankPlacement
from keras_towers.jobs.rendezvous.launchers import ClusterEnvironment
from keras_towers.jobs.rendezvous.liveness import wait_loop
from keras_towers.jobs.rendezvous.rank_helper import (
    INTRODUCTIONS,
    PLACEMENT,
    start_heartbeat,
    start_store,
    stop_helper,
)
from keras_towers.jobs.rendezvous.store import (
    Endpoint,
    MissingRanks,
    StoreClient,
)

_MIN_SECRET_LENGTH = 16
# Rank 0 has not started; or the address is left over from an earlier job, and
# another program may listen at it.
_NO_ANSWER = (OSError, ValueError)


def join_job() -> None:
    """Meet the other ranks, if a launcher other than ours started the job."""
    environment = launchers.detect_foreign()
    if environment is None:
        return
    if environment.size is None:
        raise TowerError(
            f"{environment.name} made this process rank {environment.rank}, "
            f"but does not say how many there are: set {ENV_SIZE} to the "
            "number of processes, or to 1 if each should train a model of its "
            "own."
        )
    if environment.rank >= environment.size:
        raise TowerError(
            f"{environment.name} made this process rank {environment.rank} of "
            f"a job of {environment.size} ranks, which are numbered 0 to "
            f"{environment.size - 1}: set {environment.rank_in} to one of "
            f"these, or {environment.size_in or ENV_SIZE} to the number of "
            "processes."
        )
    meeting = Meeting(environment)
    is_rank_0 = environment.rank == 0
    os.environ.update(
        meeting.join_as_rank_0() if is_rank_0 else meeting.join_rank_0()
    )


def given_endpoint() -> Endpoint | None:
    """Return the address and secret that the user has set, or None."""
    point = os.environ.get(ENV_RENDEZVOUS)
    if not point:
        return None
    address, _, port = point.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TowerError(
            f"{ENV_RENDEZVOUS} is {point!r}: give host:port of rank 0."
        )
    secret = os.environ.get(ENV_SECRET, "")
    if len(secret) < _MIN_SECRET_LENGTH:
        raise TowerError(
            f"{ENV_RENDEZVOUS} needs {ENV_SECRET} too, the same on all ranks "
            f"and known to nobody else: at least {_MIN_SECRET_LENGTH} "
            "characters, such as those that `openssl rand -hex 32` prints."
        )
    return Endpoint(address, int(port), secret)


class RendezvousFile:
    """The private file with the address of rank 0 and the job's secret."""

    def __init__(self, environment: ClusterEnvironment):
        base = Path(
            os.environ.get(settings.ENV_RENDEZVOUS_FOLDER)
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
        self._written: JsonObject | None = None

    def write(self, endpoint: Endpoint) -> None:
        """Write the file, replacing any that an earlier job left."""
        self._written = dataclasses.asdict(endpoint)
        with self._usable():
            self._store.put(self._key, self._written)

    def read(self) -> Endpoint | None:
        """Read the file; None as long as it does not exist."""
        with self._usable():
            entry = self._store.get(self._key)
        try:
            return Endpoint(**entry)
        except TypeError:  # There is no file, or another version wrote it.
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
                f"used ({error.strerror}): set "
                f"{settings.ENV_RENDEZVOUS_FOLDER} to a folder that all "
                "machines of the job share."
            ) from None


class Meeting:
    """A rank that joins its job; both methods return the rank's environment."""

    def __init__(self, environment: ClusterEnvironment):
        self._rank, self._size = environment.rank, environment.size or 0
        self._environment = environment
        self._given = given_endpoint()
        self._file = None if self._given else RendezvousFile(environment)
        self._limit_s = rank_environment.meeting_limit_s()
        # As rank 0's helper has said last.
        self._missing = MissingRanks([], 0)

    def join_as_rank_0(self) -> dict[str, str]:
        """Open the store, and wait there for all other ranks."""
        address = (
            self._given.address
            if self._given
            else network.reachable_address(self._environment)
        )
        bound = network.listen_address(address)
        wanted = self._given or Endpoint(address, 0, "")
        try:
            helper, endpoint = start_store(
                dataclasses.replace(wanted, address=bound), self._size
            )
        except OSError as error:
            raise TowerError(
                f"rank 0 cannot listen on port {wanted.port} of "
                f"{bound or 'this machine'}: {error.strerror}. Set "
                f"{ENV_RENDEZVOUS} to an address and a free port of rank 0."
            ) from None
        # Other machines may need another address than this one.
        endpoint = dataclasses.replace(
            endpoint, address=bound or network.LOOPBACK
        )
        try:
            if self._file:
                self._file.write(dataclasses.replace(endpoint, address=address))
            return self._register(lambda: endpoint)
        except TimeoutError:
            client = StoreClient(endpoint)
            text = (
                f"{self._environment} has waited {self._limit_s:.0f} s: "
                f"{_not_there(self._missing)}. Has it ended, or not reached "
                f"this line? {ENV_RENDEZVOUS_TIMEOUT} sets the seconds."
            )
            for rank in range(self._size):
                client.put(f"{PLACEMENT}-{rank}", {"failed": text})
            time.sleep(settings.FAILURE_REPORT_S)
            stop_helper(helper)
            raise TowerError(text) from None
        except BaseException:
            stop_helper(helper)
            raise
        finally:
            if self._file:
                self._file.remove()

    def join_rank_0(self) -> dict[str, str]:
        """Find the store of rank 0, and wait there for all other ranks."""
        how = f"at {ENV_RENDEZVOUS}={os.environ.get(ENV_RENDEZVOUS)}"
        if self._file:
            how = (
                f"in the file {self._file.path}. If the machines do not share "
                f"its folder, set {settings.ENV_RENDEZVOUS_FOLDER} to one that "
                f"they share, or {ENV_RENDEZVOUS} and {ENV_SECRET}"
            )
        find = self._file.read if self._file else lambda: self._given
        try:
            return self._register(find)
        except TimeoutError as late:
            raise TowerError(
                f"{self._environment} waited {self._limit_s:.0f} s for rank 0, "
                f"expected {how}. The last attempt: {late}. "
                f"{ENV_RENDEZVOUS_TIMEOUT} sets the seconds."
            ) from None

    def _register(self, find: Callable[[], Endpoint | None]) -> dict[str, str]:
        """Introduce this rank at the store, and wait for its placement.

        Args:
            find: returns the store; None if it does not exist, or has ended.

        Raises:
            TimeoutError: the limit has passed; it says what failed last.
        """
        nonce, endpoint = secrets.token_hex(8), None
        last = "there is no such file"
        pause_s, answered = settings.NETWORK_POLL_S, [time.monotonic()]
        for late_s in wait_loop(self._limit_s, pause_s, answered):
            # Rank 0 removes the file when all ranks have arrived.
            endpoint = find() or endpoint
            if endpoint:
                last = f"{endpoint.address}:{endpoint.port}"
                try:
                    address = socket.gethostbyname(endpoint.address)
                    endpoint = dataclasses.replace(endpoint, address=address)
                    client = StoreClient(endpoint)
                    self._missing, found = client.give(
                        INTRODUCTIONS,
                        self._rank,
                        self._size,
                        _introduction(endpoint, nonce),
                        settings.HOLD_S,
                        f"{PLACEMENT}-{self._rank}",
                    )
                    placement = found or {}
                    if late_s and not placement:
                        last = _not_there(self._missing)
                except _NO_ANSWER as error:
                    last += f" did not answer as rank 0 does: {error}"
                else:
                    if placement.get("nonce") == nonce:
                        return _take_place(endpoint, placement)
                    if "failed" in placement:
                        raise TowerError(placement["failed"])
                    if placement:
                        last += " belongs to another job"
                    elif self._rank > 0:
                        # Rank 0 answers, and gives up when the limit is over.
                        answered.append(time.monotonic())
            if late_s:
                logger.warning(
                    "%s has waited %.0f s: %s.", self._environment, late_s, last
                )
        raise TimeoutError(last)


def _not_there(missing: MissingRanks) -> str:
    """Say which ranks have not arrived."""
    if not missing.number:
        return "all ranks have arrived, and are about to get their placements"
    names = missing.named(missing.some)
    return (
        f"rank {names} has not arrived"
        if missing.number == 1
        else f"ranks {names} have not arrived"
    )


def _introduction(endpoint: Endpoint, nonce: str) -> JsonObject:
    """Describe this rank to rank 0's helper.

    Two machines may have the same name, and the containers of one machine have
    the same boot id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    name = socket.gethostname()
    return {
        "host": f"{name}-{boot[:8]}",
        "name": name,
        "address": agent.source_address(endpoint.address),
        "cores": sorted(os.sched_getaffinity(0)),
        "nonce": nonce,
    }


def _take_place(endpoint: Endpoint, placement: JsonObject) -> dict[str, str]:
    """Start this rank's heartbeat and set up its host; return its variables."""
    slot = RankPlacement(**placement["slot"])
    activity.this_rank.rank0_name = placement["rank0_name"]
    if slot.rank > 0:
        start_heartbeat(endpoint, slot.rank, slot.size)
    common = rank_environment.process_environment(
        rank_environment.seconds(
            settings.ENV_STALL_WARNING, settings.STALL_WARNING_S
        ),
        rank_environment.seconds(
            settings.ENV_STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S
        ),
    )
    environment = {
        **os.environ,
        **rank_environment.job_environment(endpoint, common, None),
        **slot.environment,
    }
    # Rank 0's route to its own store does not lead to ranks on other machines.
    remote = placement["remote_address"] if slot.rank == 0 else None
    # In jobs of our launcher the agent does this before the rank starts.
    agent.set_up_host(
        environment, remote or endpoint.address, placement["sharing"]
    )
    return environment
