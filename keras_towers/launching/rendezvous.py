"""The job's rendezvous server, on one address, for the job's own ranks.

It answers as Horovod's does, whose clients ask it, and which listens on all
addresses of the machine and asks nobody who they are.
"""

from __future__ import annotations

import importlib
import io
import ipaddress
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from types import ModuleType
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.launching.rounds import Rounds
from keras_towers.launching.values import Values, ValuesHandler
from keras_towers.rendezvous import (
    SCOPE,
    SIGNATURE,
    come,
    same,
    sign,
    token,
)

# Where each rank first leaves its address for the others.
_FIRST_SCOPE = "global"
# How engines other than Horovod tell that a rank has met the others.
_COME = come(0)[:-1]
# Where Horovod's own elastic state leaves a pickle.
_PICKLED_SCOPE = "worker_addresses"
_FORBIDDEN = 403
# Of a refused request: a client that is still sending would see no answer.
_READ_AT_MOST = 64 << 10


def horovod(module: str) -> ModuleType:
    """Import a module of Horovod's launcher.

    Raises:
        TowerError: Horovod is not installed, or lacks a package of its own.
    """
    name = f"horovod.{module}"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("horovod"):
            reason = "Horovod is not installed in this environment"
        else:
            reason = f"Horovod does not load in this environment ({error})"
        advice = "run `keras-towers install horovod`"
        raise TowerError(f"{reason}: {advice}.") from error


class RendezvousServer:
    """Where a job's ranks find one another, reachable at one address alone.

    On loopback, only users of this machine can get at the job, and without its
    secret they are refused.

    Args:
        address: the address of this machine that ranks meet at.
        secret: the job's.
        on_come: called from another thread with each rank that connects.

    Attributes:
        begin_round: called with the places of the ranks whenever they begin to
            meet, several times in an elastic job.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        on_come: Callable[[int], None] | None = None,
    ):
        self.begin_round: Callable[[Sequence[Any]], None] = lambda plan: None
        self._address = address
        self._secret = secret
        self._on_come = on_come
        self._values: Values | None = None

    def start(
        self,
        handler: type[BaseHTTPRequestHandler] = ValuesHandler,
        port: int = 0,
    ) -> int:
        """Listen, and return the port.

        Args:
            handler: answers requests that know the secret.
            port: where to listen; 0: anywhere.

        Raises:
            OSError: it is in use.
        """
        self._values = Values(
            (self._address, port),
            guarded(_noting(handler, self._on_come), self._secret),
        )
        threading.Thread(target=self._values.serve_forever, daemon=True).start()
        return int(self._values.server_address[1])

    def init(self, host_alloc_plan: Sequence[Any]) -> None:
        """Let ranks meet; the name is that of Horovod's server.

        Args:
            host_alloc_plan: the ``Slot`` of each, or Horovod's ``SlotInfo``.
        """
        scopes: dict[str, int] = {}
        for slot in host_alloc_plan:
            scopes[_FIRST_SCOPE] = slot.size
            scopes[f"local_{slot.hostname}"] = slot.local_size
            scopes[f"cross_{slot.local_rank}"] = slot.cross_size
        self._started().restart(scopes)
        self.begin_round(host_alloc_plan)

    def put(self, key: str, value: Any) -> None:
        """Leave word for the ranks, until the next round."""
        values = self._started()
        with values.cache_lock:
            scope = values.cache.setdefault(SCOPE, {})
            scope[key] = json.dumps(value).encode()

    def get(self, key: str) -> Any:
        """What a rank has left word of, None if nothing."""
        values = self._started()
        with values.cache_lock:
            said = values.cache.get(SCOPE, {}).get(key)
        return None if said is None else json.loads(said)

    def stop(self) -> None:
        """Answer no more."""
        if self._values is not None:
            self._values.shutdown()
            self._values.server_close()
            self._values = None

    def _started(self) -> Values:
        assert self._values is not None
        return self._values


def _noting(base: Any, on_come: Callable[[int], None] | None) -> Any:
    """A handler that tells of each rank that leaves its address."""

    class _Noting(base):
        def _put_value(self, scope, key, value):
            super()._put_value(scope, key, value)
            met = scope == SCOPE and key.startswith(_COME)
            if on_come and (met or scope == _FIRST_SCOPE):
                on_come(_rank_of(key))

    return _Noting


def _rank_of(key: str) -> int:
    return int(key.removeprefix("rank_"))  # "rank_3", and later "3".


def guarded(base: Any, secret: str) -> Any:
    """A handler that answers only those who know the job's secret.

    Args:
        base: a ``ValuesHandler``, or Horovod's.
        secret: the job's.
    """

    class _Guarded(base):
        path: str
        rfile: Any

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            try:
                length = max(0, int(self.headers.get("Content-Length") or 0))
            except ValueError:
                length = 0
            begin, _, path = self.path[1:].partition("/")
            # Behind the token Horovod's clients put the port once more.
            wanted = f"{token(secret)}:{self.server.server_address[1]}"
            if not same(begin, wanted):
                return self._refuse(length)
            self.path = f"/{path}"
            body = self.rfile.read(length)
            scope, *keys = path.split("/")
            # There is nothing for HEAD to do but to look for a file.
            if self.command not in ("GET", "PUT", "DELETE") or len(keys) != 1:
                return self._refuse()
            if scope == SCOPE:
                right = sign(secret, self.command, self.path, body)
                if not same(self.headers.get(SIGNATURE, ""), right):
                    return self._refuse()
            self.rfile = io.BytesIO(body)
            return True

        def _refuse(self, unread: int = 0) -> bool:
            self.rfile.read(min(unread, _READ_AT_MOST))
            self.send_status_code(_FORBIDDEN)
            return False

    return _Guarded


def elastic_handler(
    base: Any, rounds: Rounds, say: Callable[[str], None]
) -> Any:
    """Horovod's elastic handler, which answers nobody before all have come.

    How long ranks wait for one another to start and how long for one that has
    died in the middle of a reduction is one setting of Horovod. Here the first
    wait is the server's, so that the second can be short.

    Args:
        base: the handler.
        rounds: knows who takes part.
        say: tells the user.
    """
    removed = horovod("runner.common.util.hosts").INVALID_SLOT_INFO

    class _Handler(base):
        def _get_rank_and_size(self, host, local_rank):
            slot = rounds.place(host, local_rank, self.connection)
            return (slot or removed).to_response_string().encode()

        def _put_value(self, scope, key, value):
            address = ipaddress.ip_address(self.server.server_address[0])
            if scope == _PICKLED_SCOPE and not address.is_loopback:
                # It is not signed, and the token may have been read on the way.
                say(
                    f"worker {key} uses Horovod's own elastic state and so, "
                    "over a network, is not told when hosts are added; "
                    "keras_towers.elastic is"
                )
                return
            super()._put_value(scope, key, value)
            if scope == _FIRST_SCOPE:
                rounds.hold(_rank_of(key), self.connection)

    return _Handler
