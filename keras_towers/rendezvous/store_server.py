"""The server of a job's store, on one address, for the job's own processes.

It answers as Horovod's does, whose clients ask it, too. ``POST`` is ours: it
leaves a value where there is none, and reads what is there; or it reports a
rank's progress, and reads which others are late or gone.
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from keras_towers import settings
from keras_towers.rendezvous.hosts import NO_PLACEMENT, RankPlacement
from keras_towers.rendezvous.store import (
    CONNECTED,
    FACTS,
    PROGRESS,
    SCOPE,
    SIGNATURE,
    Endpoint,
    Progress,
    Store,
    path_prefix,
    same,
    sign,
    sign_answer,
)

logger: logging.Logger = logging.getLogger("keras_towers")

RENDEZVOUS_SCOPE = "global"
"""The scope in which each rank of Horovod first leaves its address."""
_PLACES_SCOPE = "rank_and_size"
# Of all scopes in which ranks of Horovod meet: of all, of a host, of its rank.
_RENDEZVOUS_SCOPES = (RENDEZVOUS_SCOPE, "local_", "cross_")
_OK, _FORBIDDEN, _NOT_FOUND = 200, 403, 404
# Of a refused request: a client that is still sending would see no answer.
_READ_AT_MOST = 64 << 10


class StoreServer(ThreadingHTTPServer, Store):
    """A job's store, for the process that serves it.

    Attributes:
        on_connected: called with the rank of each process that meets the
            others, and its connection.
        place: None but in an elastic job: called with ``host:local_rank`` of a
            worker and its connection, it returns the worker's slot.
        gone: the name and state of each rank that is gone, where no launcher
            watches the ranks.
    """

    # All ranks may come at once; whom the kernel turns away waits for seconds.
    request_queue_size = 1024

    def __init__(
        self, address: str, port: int = 0, secret: str | None = None
    ) -> None:
        super().__init__((address, port), Handler)
        self.endpoint = Endpoint(
            address,
            int(self.server_address[1]),
            secret or secrets.token_hex(32),
        )
        self.on_connected: Callable[[int, socket.socket], None] = (
            lambda rank, connection: None
        )
        self.place: (
            Callable[[str, socket.socket], RankPlacement | None] | None
        ) = None
        self.gone: dict[int, tuple[str, str]] = {}
        self._reports: dict[int, tuple[float, Progress]] = {}
        self.lock = threading.Lock()
        self.values: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self._awaited: dict[tuple[str, str], threading.Event] = {}
        self.given_up: collections.Counter[str] = collections.Counter()
        self.scope_size: dict[str, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def begin(self, plan: Sequence[RankPlacement]) -> None:
        """Discard the previous round, and let the ranks of a plan meet."""
        with self.lock:
            facts = self.values[SCOPE].get(FACTS)
            self.values.clear()
            if facts is not None:
                self.values[SCOPE][FACTS] = facts
            self._reports.clear()
            self.given_up.clear()
            self.scope_size = {}
            for slot in plan:
                self.scope_size[RENDEZVOUS_SCOPE] = slot.size
                self.scope_size[f"local_{slot.hostname}"] = slot.local_size
                self.scope_size[f"cross_{slot.local_rank}"] = slot.cross_size

    def read(
        self, scope: str, key: str, hold_s: float | None = 0
    ) -> bytes | None:
        with self.lock:
            found = self.values[scope].get(key)
            if found is not None or not hold_s:
                return found
            # One for each key: who waits for another one is not woken.
            awaited = self._awaited.setdefault((scope, key), threading.Event())
        awaited.wait(hold_s)
        with self.lock:
            return self.values[scope].get(key)

    def write(
        self, scope: str, key: str, value: bytes, *, first: bool = False
    ) -> bytes:
        with self.lock:
            values = self.values[scope]
            values[key] = values.get(key, value) if first else value
            awaited = self._awaited.pop((scope, key), None)
            if awaited is not None:
                awaited.set()
            return values[key]

    def report(self, rank: int, progress: Progress) -> dict[str, Any]:
        """Take a rank's progress; return which others are late or gone."""
        with self.lock:
            self._reports[rank] = time.monotonic(), progress
            reports = dict(self._reports)
        gone = dict(state for r, state in self.gone.items() if r != rank)
        return {"late": late_ranks(rank, reports), "gone": gone}

    def stop(self) -> None:
        """Stop the server."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error in a request."""
        # As a rule who asked is gone, which is said where it is noticed.
        logger.debug("request from %s", client_address, exc_info=True)


def late_ranks(
    rank: int, reports: Mapping[int, tuple[float, Progress]]
) -> dict[str, str]:
    """The ranks for which a rank that has just reported waits, and why.

    Of many ranks each looks at some after its own only, so that one that is
    missing is told of by as many.

    Args:
        rank: which rank waits.
        reports: the arrival, by ``time.monotonic``, and content of each rank's
            last report.
    """
    now, own = reports[rank]
    found = {}
    for after in range(1, min(own.size, settings.LOOKED_AT + 1)):
        other = (rank + after) % own.size
        if other not in reports:
            found[other] = "has given no sign of life"
            continue
        arrived, its = reports[other]
        where = f"in {its.what}" if its.what else "outside of training"
        if now - arrived > its.limit_s:
            found[other] = "has stopped giving signs of life"
        elif its.position < own.position:
            found[other] = f"is still {where}"
        elif its.position == own.position and its.what != own.what:
            # As many steps, but others: each waits for the other one.
            found[other] = f"is {where}"
    named = itertools.islice(sorted(found.items()), settings.NAMED)
    reasons = {f"rank {other}": why for other, why in named}
    if len(found) > len(reasons):
        reasons[f"{len(found) - len(reasons)} more"] = "likewise"
    return reasons


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of those who know the job's secret."""

    server: StoreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = settings.REQUEST_S

    def parse_request(self) -> bool:
        """Parse a request, and refuse one from outside of the job."""
        if not super().parse_request():
            return False
        try:
            length = max(0, int(self.headers.get("Content-Length") or 0))
        except ValueError:
            length = 0
        begin, _, path = self.path[1:].partition("/")
        if not same(begin, path_prefix(self.server.endpoint)):
            self.rfile.read(min(length, _READ_AT_MOST))
            return self._refuse()
        self.path, self._body = f"/{path}", self.rfile.read(length)
        self._scope, *keys = path.split("/")
        # There is nothing for HEAD to do but to look for a file.
        known = ("GET", "PUT", "POST", "DELETE")
        if self.command not in known or len(keys) != 1:
            return self._refuse()
        (self._key,) = keys
        if self._scope == SCOPE:
            secret = self.server.endpoint.secret
            right = sign(secret, self.command, self.path, self._body)
            if not same(self.headers.get(SIGNATURE, ""), right):
                return self._refuse()
        return True

    def do_GET(self) -> None:
        """Answer with a value."""
        server = self.server
        if self._scope == _PLACES_SCOPE and server.place:
            slot = server.place(self._key, self.connection)
            value = (slot.encode() if slot else NO_PLACEMENT).encode()
        else:
            text = server.read(self._scope, self._key, self._hold_s())
            if text is None:
                return self._answer(_NOT_FOUND)
            value = text
        self._answer(_OK, value)

    def do_POST(self) -> None:
        """Store a value if there is none; answer with the current one.

        A rank that reports is told which others are late or gone.
        """
        if self._scope == SCOPE and self._key.startswith(PROGRESS):
            rank = int(self._key.removeprefix(PROGRESS))
            progress = Progress(**json.loads(self._body))
            answer = self.server.report(rank, progress)
            return self._answer(_OK, json.dumps(answer).encode())
        current = self.server.write(
            self._scope, self._key, self._body, first=True
        )
        self._answer(_OK, current)

    def do_PUT(self) -> None:
        """Store a value."""
        self.server.write(self._scope, self._key, self._body)
        ours = self._scope == SCOPE and self._key.startswith(CONNECTED)
        if ours or self._scope == RENDEZVOUS_SCOPE:
            # Horovod has the rank alone as the key.
            rank = int(self._key.removeprefix(CONNECTED))
            self.server.on_connected(rank, self.connection)
        self._answer(_OK)

    def do_DELETE(self) -> None:
        """Delete a value; a shared scope, once all ranks have asked for it."""
        server, scope = self.server, self._scope
        with server.lock:
            if scope not in server.scope_size:
                server.values[scope].pop(self._key, None)
            else:
                server.given_up[scope] += 1
                if server.given_up[scope] == server.scope_size[scope]:
                    server.values[scope].clear()
                    del server.given_up[scope]
        self._answer(_OK)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""

    def _hold_s(self) -> float:
        """How long to wait for a missing value."""
        if self._scope.startswith(_RENDEZVOUS_SCOPES):
            # Each rank of Horovod will come; who waits would ask all the time.
            return settings.HOLD_S
        return min(float(self._body or 0), settings.HOLD_S)

    def _refuse(self) -> bool:
        self._answer(_FORBIDDEN)
        return False

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        # Who is refused must not get a signature for a path of its choice.
        if status == _OK:
            secret = self.server.endpoint.secret
            signature = sign_answer(secret, self.command, self.path, body)
            self.send_header(SIGNATURE, signature)
        self.end_headers()
        self.wfile.write(body)
