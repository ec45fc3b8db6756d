"""The job's rendezvous server as a rank asks it, and how each knows the other.

Horovod's server answers whoever reaches it, and unpickles some of what it is
sent. ``keras-towers run`` therefore makes a secret for every job, which a rank
finds in its environment and nowhere else. Two things are made from it:

- a token that every path has to begin with. Horovod's C++ code cannot sign its
  requests, but it puts ``http://``, the host's name, the port and the path
  together as text: a token behind the host's name is part of every path.
- a signature of each request of this package, because a token can be read
  where it crosses a network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import urllib.error
import urllib.request
from typing import Protocol

from keras_towers.errors import TowerError

SECRET = "KERAS_TOWERS_SECRET"
# Set by a launcher that shows each rank GPUs of its own, instead of all of the
# machine for ranks to take theirs by local rank.
OWN_GPUS = "KERAS_TOWERS_OWN_GPUS"
SIGNATURE = "X-Keras-Towers-Signature"
# What this package keeps on the server.
SCOPE = "keras_towers"
# Of an elastic job: when hosts came or went last, and which of it.
NEWS = "hosts_updated"
_HTTP_NOT_FOUND = 404
_ELASTIC = "HOROVOD_ELASTIC"
# In the order of the answer to where a worker's place is.
_PLACE = tuple(
    f"HOROVOD_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK"),
        *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    )
)

# A proxy would read the token, and does not know this machine's loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def new_secret() -> str:
    """The secret of a new job."""
    return secrets.token_hex(32)


def token(secret: str) -> str:
    """What every path on the server begins with; tells nothing of the secret.

    Args:
        secret: the job's.
    """
    return _digest(secret, b"token")


def sign(secret: str, method: str, path: str, body: bytes) -> str:
    """The signature of a request.

    Args:
        secret: the job's.
        method: ``GET``, ``PUT`` or ``DELETE``.
        path: the path behind the token.
        body: what is sent, maybe nothing.
    """
    return _digest(secret, f"{method} {path}\n".encode() + body)


def same(one: str, other: str) -> bool:
    """Compare in a time that does not tell how much is right."""
    return hmac.compare_digest(one.encode(), other.encode())


def _digest(secret: str, message: bytes) -> str:
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def come(rank: int) -> str:
    """The key by which a rank tells that it has met the others."""
    return f"rank_{rank}"


class Board(Protocol):
    """Where processes of a job leave values for one another."""

    def get(self, key: str) -> bytes | None:
        """Read a value, None if there is none; OSError if all is gone."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Leave a value; OSError if all is gone."""
        ...


class Rendezvous:
    """A client of the job's rendezvous server.

    Args:
        address: its host's name, with the token behind it if it wants one.
        port: its port.
        secret: the job's; None under a launcher that has none.

    Example:
        >>> server = rendezvous.from_environment()
        >>> server.put("mine", b"here")
    """

    def __init__(self, address: str, port: str, secret: str | None = None):
        self._url = f"http://{address}:{port}"
        self._secret = secret

    @property
    def signed(self) -> bool:
        """Whether the server is that of ``keras-towers run``."""
        return self._secret is not None

    def get(
        self, key: str, scope: str = SCOPE, timeout_s: float | None = 5.0
    ) -> bytes | None:
        """Read a value, None if there is none.

        Args:
            key: its name.
            scope: what it belongs to.
            timeout_s: how long to wait for the answer; None: for ever.

        Raises:
            OSError: the server is gone, or refuses.
        """
        try:
            return self._ask("GET", f"/{scope}/{key}", b"", timeout_s)
        except urllib.error.HTTPError as error:
            if error.code != _HTTP_NOT_FOUND:
                raise
            return None

    def put(self, key: str, value: bytes, timeout_s: float = 5.0) -> None:
        """Leave a value.

        Raises:
            OSError: the server is gone, or refuses.
        """
        self._ask("PUT", f"/{SCOPE}/{key}", value, timeout_s)

    def _ask(
        self, method: str, path: str, body: bytes, timeout_s: float | None
    ) -> bytes:
        headers = {}
        if self._secret is not None:
            headers[SIGNATURE] = sign(self._secret, method, path, body)
        request = urllib.request.Request(
            self._url + path, body or None, headers, method=method
        )
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())


def from_environment() -> Rendezvous | None:
    """A client of the server that the launcher has named, None without one.

    Under MPI there is none.
    """
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not address or not port:
        return None
    secret = os.environ.get(SECRET)
    # A rank may be a launcher too, of another job with a server of its own.
    ours = secret is not None and address.endswith(token(secret))
    return Rendezvous(address, port, secret if ours else None)


def take_place() -> None:
    """Wait until all workers of an elastic job are there, and take a rank.

    To be called before Horovod connects for the first time in a process. What
    rank the launcher has started it with may be out of date: others that died
    meanwhile are not waited for. Later Horovod asks by itself.

    Raises:
        TowerError: the job goes on without this worker.
        OSError: the launcher is gone.
    """
    server = from_environment()
    if server is None or not server.signed or not os.environ.get(_ELASTIC):
        return
    slot = ":".join(
        os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "LOCAL_RANK")
    )
    answer = server.get(slot, scope="rank_and_size", timeout_s=None) or b"-1"
    place = answer.decode().split(",")
    if place[0] == "-1":
        raise TowerError("the job has gone on without this worker.")
    os.environ.update(zip(_PLACE, place, strict=True))
