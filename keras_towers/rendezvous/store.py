"""The key-value store through which a job's processes meet; its signatures.

One process serves it. Requests and answers of this package are signed with the
job's secret. Horovod's clients, which cannot sign, send a token in their paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math
import os
import stat
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from keras_towers import settings
from keras_towers._types import JsonObject
from keras_towers.errors import TowerError
from keras_towers.rendezvous import activity
from keras_towers.system import replace_file

_Value = TypeVar("_Value")

HOROVODS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVODS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
SIGNATURE = "X-Keras-Towers-Signature"
SCOPE = "keras_towers"
"""The scope of this package's keys; other scopes are Horovod's."""
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
PROGRESS = "progress-"
"""Followed by a rank, the key under which the rank reports its progress."""
OUTSIDE = "outside of training"
"""How the description of a rank ends that makes no call of the job."""
MAX_BYTES: int = 16 << 20
"""Largest value. A signature covers it, so it is read before it is known who
sends it."""
_NOT_FOUND = 404
# A proxy would see the token, and cannot reach this machine's loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
    def write(
        self, scope: str, key: str, value: bytes, *, if_absent: bool = False
    ) -> bytes:
        """Write bytes, optionally only if there are none; return the result."""

    def wait(self, key: str, timeout_s: float = math.inf) -> bytes:
        """Wait for the bytes of a key, which another process is to write.

        Without a limit: if that process ends, the launcher ends this one.

        Raises:
            TimeoutError: none has written them in this time.
        """
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            content = self.read(SCOPE, key, min(left_s, settings.HOLD_S))
            if content is not None:
                return content
            if not left_s:
                raise TimeoutError

    def get(self, key: str, hold_s: float = 0) -> Any:
        """Read a value, waiting ``hold_s`` for a missing one; None if none."""
        content = self.read(SCOPE, key, hold_s)
        return None if content is None else json.loads(content)

    def put(self, key: str, value: object) -> None:
        """Write a value."""
        self.write(SCOPE, key, json.dumps(value).encode())

    def setdefault(self, key: str, value: object) -> Any:
        """Write a value if there is none; return the stored one."""
        encoded = json.dumps(value).encode()
        return json.loads(self.write(SCOPE, key, encoded, if_absent=True))


@dataclasses.dataclass
class Progress:
    """How far a rank is, as it reports at every beat.

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
    in_python: bool = False
    does: str = ""

    @property
    def where(self) -> str:
        """Where the rank is, or was last seen, to follow its name."""
        if not self.action:
            return f"is {OUTSIDE}"
        if self.waits:
            return f"is in {self.action}"
        return (
            f"was last seen {'after' if self.is_over else 'in'} {self.action}"
        )

    def stands_against(self, other: Progress) -> bool:
        """Whether the two ranks wait for each other in different exchanges.

        Both have begun as many exchanges, so that each has begun one which the
        other has not. Graphs alone may begin exchanges in another order. What
        a rank waits for at a save is no exchange, and has no place among them.
        """
        saves = activity.SAVE in other.exchanges
        return (
            (saves or self.position == other.position)
            and bool(self.exchanges and other.exchanges)
            and set(self.exchanges).isdisjoint(other.exchanges)
            and (self.in_python or other.in_python)
        )


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address of a store's server, and the secret of its job."""

    address: str
    port: int
    secret: str


class StoreClient(Store):
    """A store that another process serves."""

    def __init__(self, endpoint: Endpoint):
        self._secret = endpoint.secret
        self.host: str = endpoint.address
        host = f"{endpoint.address}:{endpoint.port}"
        self._url = f"http://{host}/{path_prefix(endpoint)}"

    def read(self, scope: str, key: str, hold_s: float = 0) -> bytes | None:
        body = str(hold_s).encode() if hold_s else b""
        try:
            return self._request("GET", scope, key, body, hold_s)
        except urllib.error.HTTPError as error:
            if error.code != _NOT_FOUND:
                raise
            return None

    def write(
        self, scope: str, key: str, value: bytes, *, if_absent: bool = False
    ) -> bytes:
        if if_absent:
            return self._request("POST", scope, key, value)
        self._request("PUT", scope, key, value)
        return value

    def report(self, rank: int, progress: Progress) -> JsonObject:
        """Report a rank's progress.

        Returns:
            Under ``"awaited"`` the ranks that it waits for, as names and
            reasons; under ``"apart"`` this rank and others, if they wait for
            one another in different exchanges, as names and what each does;
            under ``"gone"`` ranks that are gone, as names and states.
        """
        body = json.dumps(dataclasses.asdict(progress)).encode()
        answer = self._request("POST", SCOPE, f"{PROGRESS}{rank}", body)
        others: JsonObject = json.loads(answer)
        return others

    def _request(
        self, method: str, scope: str, key: str, body: bytes, hold_s: float = 0
    ) -> bytes:
        path = f"/{scope}/{key}"
        limit_s = settings.STORE_ANSWER_S + hold_s
        request = urllib.request.Request(
            self._url + path,
            body or None,
            {SIGNATURE: sign_request(self._secret, method, path, body)},
            method=method,
        )
        with _OPENER.open(request, timeout=limit_s) as answer:
            content = bytes(answer.read())
            signature = answer.headers.get(SIGNATURE, "")
        expected = sign_answer(self._secret, method, path, content)
        if not is_equal(signature, expected):
            raise OSError("the answer's signature is wrong")
        return content


class FileStore:
    """A store in a private folder."""

    def __init__(self, folder: Path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder, folder.lstat())
        self._folder = folder

    def get(self, key: str) -> Any:
        path = self._folder / key
        # Makes a shared file system forget that the file did not exist.
        os.listdir(self._folder)
        try:
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with open(opened, encoding="utf-8") as file:
            _check_private(path, os.fstat(file.fileno()))
            with contextlib.suppress(ValueError):
                return json.loads(file.read())
        return None

    def put(self, key: str, value: object) -> None:
        encoded = json.dumps(value).encode()
        replace_file(self._folder / key, lambda file: file.write(encoded))

    def remove(self, key: str, value: object) -> None:
        """Remove a key, unless its value has changed."""
        with contextlib.suppress(OSError, TowerError):
            if self.get(key) == value:
                (self._folder / key).unlink()


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


def report_connected(rank: int) -> None:
    """Report to the launcher, if any, that a rank has connected."""
    store = store_of_job()
    if store is not None:
        with contextlib.suppress(OSError):
            store.put(f"{CONNECTED}{rank}", True)


def wait_for(
    read: Callable[[], _Value | None], timeout_s: float | None = None
) -> _Value:
    """Wait until ``read`` returns a value, or raise TimeoutError."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    pause_s = settings.FIRST_PAUSE_S
    while (value := read()) is None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not written after {timeout_s} s")
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, settings.POLL_S)
    return value


def path_token(secret: str) -> str:
    """The start of every path, which reveals nothing about the secret.

    Horovod's C++ code cannot sign its requests. But it concatenates "http://",
    the host's name, the port and the path as text, so that a token at the end
    of the host's name becomes part of every path.
    """
    return _digest(secret, b"token")


def path_prefix(endpoint: Endpoint) -> str:
    """The start of every path: the token, and the port as Horovod adds it."""
    return f"{path_token(endpoint.secret)}:{endpoint.port}"


def sign_request(secret: str, method: str, path: str, body: bytes) -> str:
    """The signature of a request."""
    return _digest(secret, f"{method} {path}\n".encode() + body)


def sign_answer(secret: str, method: str, path: str, body: bytes) -> str:
    """The signature of the answer to a request."""
    return sign_request(secret, f"ANSWER {method}", path, body)


def sign_file(secret: str, content: bytes) -> bytes:
    """The signature of a file of the job."""
    return bytes.fromhex(_digest(secret, b"file\n" + content))


def is_equal(one: str, other: str) -> bool:
    """Compare secrets, in a time that does not depend on them."""
    return hmac.compare_digest(one.encode(), other.encode())


def _digest(secret: str, message: bytes) -> str:
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def _check_private(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
        raise TowerError(
            f"{path} belongs to another user: set "
            f"{settings.ENV_RENDEZVOUS_FOLDER} to another folder."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TowerError(
            f"{path} holds secrets of jobs and can be read or written by other "
            f"users: run `chmod go= {path}`."
        )
