"""The key-value store through which the processes of a job meet.

One process serves it (``store_server.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from keras_towers.foundation import settings
from keras_towers.foundation.message_lists import listed
from keras_towers.foundation.object_types import JsonObject
from keras_towers.jobs.rendezvous import activity
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    is_equal,
    path_token,
)

_Value = TypeVar("_Value")

SCOPE = "keras_towers"
"""The scope of this package's keys; other scopes are Horovod's."""
MAX_BYTES: int = 16 << 20
"""Largest value. A signature covers it, so it is read before it is known who
sends it."""
HOLD = "?hold="
"""Follows a key that is read, and precedes how many seconds to wait for it."""
HOROVODS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVODS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
RESUMES = "resumes"
"""The key of whether ranks make a backup when they are told to end."""
COMMITTED = "committed"
"""The key of the last backup: its file, and the position of the training."""
BEGIN = "begin-{}-{}"
"""With the number of a round and of a process, the key of the variables with
which the process begins that round if it has stood by for it."""
FACTS = "facts"
"""The key of the first rank's versions, with which all ranks compare theirs."""
CONNECTED = "rank_"
"""Followed by a rank, the key of a rank that has connected to its job."""
HEARTBEAT = "heartbeat-"
"""Followed by a rank, the key of the rank's last sign of life."""
ERROR = "error-"
"""Followed by a rank, the key of the error by which the rank's script ends, and
of whether the failure of another rank is why."""
OUTSIDE = "outside of training"
"""How the description of a rank ends that makes no call of the job."""


class MissingRanks(NamedTuple):
    """The ranks that have not contributed to a list.

    Attributes:
        some: the first ones.
        number: how many there are.
    """

    some: list[int]
    number: int

    def named(self, some: Sequence[object]) -> str:
        """List them, given the names of the first ones."""
        return listed(some, number=self.number)


class Store(ABC):
    """The store of a job: JSON values of this package, bytes of Horovod's."""

    @abstractmethod
    def read(self, scope: str, key: str, hold_s: float = 0) -> bytes | None:
        """Read the bytes of a key, or None.

        Args:
            scope: ``SCOPE``, or one of Horovod's.
            key: a key of that scope.
            hold_s: how long to wait for a missing value.
        """

    @abstractmethod
    def write(self, scope: str, key: str, value: bytes) -> None:
        """Write the bytes of a key."""

    @abstractmethod
    def setdefault(self, key: str, value: object) -> Any:
        """Write a value if there is none; return the stored one."""

    @abstractmethod
    def give(
        self,
        key: str,
        rank: int,
        size: int,
        value: object,
        hold_s: float = 0,
        awaited: str = "",
    ) -> tuple[MissingRanks, Any]:
        """Contribute to a list, and wait for it, or for another value.

        When all have contributed, the value of the key is the list of
        contributions, so that no rank reads a key of each other one.

        Args:
            key: the key of the list.
            rank: this rank.
            size: the number of ranks.
            value: the part; given again, it replaces the one before. None
                is left out of the list: what all ranks read is then as short
                for many ranks as for few.
            hold_s: how long to wait.
            awaited: the key of what to wait for; empty: the list.

        Returns:
            The ranks that have yet to contribute; and what was awaited, or
            None if it is not there in time.
        """

    @abstractmethod
    def add(self, key: str, rank: int, items: Sequence[str]) -> None:
        """Add items of a rank to a value, which records who has added each.

        The value is a dictionary with the first two ranks of each item. So a
        rank reads in one key, which does not grow with the number of ranks,
        whether another rank has added an item.
        """

    def wait(
        self,
        key: str,
        timeout_s: float = math.inf,
        given_up: threading.Event | None = None,
    ) -> bytes:
        """Wait for the bytes of a key, which another process is to write.

        Without a limit: if that process ends, the launcher ends this one.

        Args:
            key: the key.
            timeout_s: the limit.
            given_up: set if nobody needs the value any more.

        Raises:
            TimeoutError: none has written them in this time.
        """

        def read(left_s: float) -> bytes | None:
            content = self.read(SCOPE, key, min(left_s, settings.LISTEN_S))
            if content is None and given_up is not None and given_up.is_set():
                raise TimeoutError
            return content

        return wait_for(read, timeout_s)

    def get(self, key: str, hold_s: float = 0) -> Any:
        """Read a value, waiting ``hold_s`` for a missing one; None if none."""
        content = self.read(SCOPE, key, hold_s)
        return None if content is None else json.loads(content)

    def put(self, key: str, value: object) -> None:
        """Write a value."""
        self.write(SCOPE, key, json.dumps(value).encode())


@dataclasses.dataclass
class Progress:
    """The progress of a rank, as it reports it at every beat.

    Attributes:
        size: the number of ranks.
        limit_s: the rank has stopped if its next report comes later than this.
        position: how often the ranks have connected again and, since then, how
            many actions of the training and how many exchanges the rank has
            begun; of two ranks, the one with the smaller list is behind.
        action: the last of these actions; empty outside of training.
        waits: whether the rank waits for others.
        is_over: whether the action is over.
        exchanges: the names of the exchanges in which it waits.
        begun: how many exchanges it has begun since then, by name.
        in_python: whether it is Python that waits in them; or else a graph may
            go on to others meanwhile.
        does: what the rank does there, to follow its name; empty: the action
            says it.
    """

    size: int
    limit_s: float
    position: list[int] = dataclasses.field(default_factory=list)
    action: str = ""
    waits: bool = False
    is_over: bool = False
    exchanges: list[str] = dataclasses.field(default_factory=list)
    begun: dict[str, int] = dataclasses.field(default_factory=dict)
    in_python: bool = False
    does: str = ""

    @property
    def where(self) -> str:
        """The words for where the rank was last seen, to follow its name."""
        if not self.action:
            return f"is {OUTSIDE}"
        if self.waits:
            return f"is in {self.action}"
        return (
            f"was last seen {'after' if self.is_over else 'in'} {self.action}"
        )

    def stands_against(self, other: Progress) -> bool:
        """Whether two ranks wait for each other in different exchanges.

        Each waits in one that the other has not begun. If only graphs exchange,
        they may begin in another order. A wait at a save is no exchange: rank 0
        does not come to it while it waits itself.
        """
        in_vain = self._leads(other) and other._leads(self)
        if activity.SAVE in other.exchanges:
            in_vain = bool(self.exchanges)
        return in_vain and (self.in_python or other.in_python)

    def _leads(self, other: Progress) -> bool:
        """Whether it waits in an exchange that the other has not begun."""
        return any(
            self.begun.get(name, 0) > other.begun.get(name, 0)
            for name in self.exchanges
        )


class StoreClient(Store):
    """A store that another process serves.

    Each request has a connection of its own, also one that waits for a value:
    threads, and children of a fork, share nothing.

    Args:
        endpoint: the store.
    """

    def __init__(self, endpoint: Endpoint):
        self.host: str = endpoint.address
        self._endpoint = endpoint

    def read(self, scope: str, key: str, hold_s: float = 0) -> bytes | None:
        hold = f"{HOLD}{hold_s}" if hold_s else ""
        return self._ask("GET", f"/{scope}/{key}{hold}", hold_s=hold_s)

    def write(self, scope: str, key: str, value: bytes) -> None:
        self._ask("PUT", f"/{scope}/{key}", value)

    def setdefault(self, key: str, value: object) -> Any:
        return self._call("setdefault", key, value)

    def give(
        self,
        key: str,
        rank: int,
        size: int,
        value: object,
        hold_s: float = 0,
        awaited: str = "",
    ) -> tuple[MissingRanks, Any]:
        missing, found = self._call(
            "give", key, rank, size, value, hold_s, awaited, hold_s=hold_s
        )
        return MissingRanks(*missing), found

    def add(self, key: str, rank: int, items: Sequence[str]) -> None:
        self._call("add", key, rank, [*items])

    def report(self, rank: int, progress: Progress) -> JsonObject:
        """Report a rank's progress.

        Returns:
            Under ``"awaited"`` the ranks that it waits for, as names and
            reasons; under ``"apart"`` this rank and others, if they wait for
            one another in different exchanges, as names and what each does;
            under ``"gone"`` ranks that are gone, as names and states.
        """
        others: JsonObject = self._call(
            "report", rank, dataclasses.asdict(progress)
        )
        return others

    def _call(self, method: str, *arguments: object, hold_s: float = 0) -> Any:
        """Call a method of the store that the server serves."""
        path, body = f"/{SCOPE}/{method}", json.dumps(arguments).encode()
        return json.loads(self._ask("POST", path, body, hold_s) or "")

    def _ask(
        self, method: str, path: str, body: bytes = b"", hold_s: float = 0
    ) -> bytes | None:
        """Make a request; return the answer, or None: there is no value.

        Raises:
            OSError: the store does not answer, or it is not the store.
        """
        store = self._endpoint
        # A long answer takes longer, but its parts do not.
        limit_s = settings.STORE_ANSWER_S + hold_s
        link = http.client.HTTPConnection(
            store.address, store.port, timeout=limit_s
        )
        headers = {SIGNATURE: store.sign_request(method, path, body)}
        with contextlib.closing(link):
            try:
                link.request(method, f"/{store.prefix}{path}", body, headers)
                answer = link.getresponse()
                content = answer.read(MAX_BYTES)
            except ConnectionError:
                raise
            except (http.client.HTTPException, ValueError) as error:
                raise OSError(
                    f"this is no answer of a store: {error!r}"
                ) from error
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise OSError(f"the store answers {answer.status}")
        expected = store.sign_answer(method, path, content)
        if not is_equal(answer.getheader(SIGNATURE, ""), expected):
            raise OSError("the answer's signature is wrong")
        return content


def store_of_job() -> StoreClient | None:
    """The store of this process's job; None if our launcher started none."""
    host, _, port = os.environ.get(settings.ENV_STORE, "").rpartition(":")
    secret = os.environ.get(settings.ENV_SECRET)
    if not host or not secret:
        return None
    # A rank of ours may have started another job by Horovod's own launcher, in
    # which this process then is.
    horovods = os.environ.get(HOROVODS_ADDRESS)
    if horovods and not horovods.endswith(path_token(secret)):
        return None
    return StoreClient(Endpoint(host, int(port), secret))


def tell_job(key: str, value: object) -> None:
    """Write a value in the job's store, if there is one and it answers."""
    store = store_of_job()
    if store is not None:
        with contextlib.suppress(OSError):
            store.put(key, value)


def ask_job(key: str, hold_s: float = 0) -> Any:
    """Read a value of the job's store; None if there is none, or no store."""
    store = store_of_job()
    if store is not None:
        with contextlib.suppress(OSError):
            return store.get(key, hold_s)
    return None


def report_connected(rank: int) -> None:
    """Report to the launcher, if any, that a rank has connected."""
    tell_job(f"{CONNECTED}{rank}", True)


def wait_for(
    read: Callable[[float], _Value | None], timeout_s: float = math.inf
) -> _Value:
    """Wait until ``read`` returns a value, or raise TimeoutError.

    Args:
        read: reads the value, given for how many seconds it may wait itself.
        timeout_s: the limit.
    """
    until, left_s = time.monotonic() + timeout_s, timeout_s
    pause_s = settings.FIRST_PAUSE_S
    while (value := read(left_s)) is None:
        if left_s <= 0:
            raise TimeoutError(f"not written after {timeout_s} s")
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, settings.POLL_S)
        left_s = max(0.0, until - time.monotonic())
    return value
