"""The server of a job's store, at one address, for the job's own processes.

It speaks the protocol of Horovod's rendezvous server, for Horovod's clients.
``POST`` is an addition: it writes a value if there is none, and returns the
stored one; or it reports a rank's progress, and returns which ranks are late,
gone, or in other exchanges.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from keras_towers import settings
from keras_towers._types import JsonObject
from keras_towers.rendezvous import activity, store
from keras_towers.rendezvous.hosts import RankPlacement
from keras_towers.rendezvous.store import SCOPE, Endpoint, Progress, Store

logger: logging.Logger = logging.getLogger("keras_towers")

RENDEZVOUS_SCOPE = "global"
"""The scope in which each rank of Horovod writes its address first."""
_KEPT = (store.FACTS, store.COMMITTED)
# How the scopes begin in which ranks of Horovod write their addresses: for all
# ranks, for the ranks of a host, and for all ranks with one local rank.
_RENDEZVOUS_SCOPES = (RENDEZVOUS_SCOPE, "local_", "cross_")
_OK, _FORBIDDEN, _NOT_FOUND = 200, 403, 404
# Read of a refused request, since a client reads no answer while it sends.
_MAX_REFUSED_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Report:
    """The last report of a rank.

    Attributes:
        arrived: when it came, by ``time.monotonic``.
        since: when the first one came that said the same.
        progress: what it says.
    """

    arrived: float
    since: float
    progress: Progress

    @property
    def is_unchanged(self) -> bool:
        """Whether the rank has said the same at two beats."""
        return self.since < self.arrived


class StoreServer(ThreadingHTTPServer, Store):
    """A job's store, for the process that serves it.

    Attributes:
        on_connected: called with the rank of each process that connects to its
            job.
        gone: the name and state of each rank that is gone.
    """

    # All ranks may connect at once, and a client that the kernel turns away
    # retries only after seconds.
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
        self.on_connected: Callable[[int], None] = lambda rank: None
        self.gone: dict[int, tuple[str, str]] = {}
        self._reports: dict[int, Report] = {}
        self.lock = threading.Lock()
        self.values: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self._awaited: dict[tuple[str, str], threading.Event] = {}
        self.given_up: collections.Counter[str] = collections.Counter()
        self.scope_size: dict[str, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def begin_round(self, plan: Sequence[RankPlacement]) -> None:
        """Discard the previous round, and let the ranks of a plan meet."""
        with self.lock:
            ours = self.values[SCOPE]
            kept = {name: ours[name] for name in _KEPT if name in ours}
            self.values.clear()
            self.values[SCOPE].update(kept)
            self._reports.clear()
            self.gone.clear()
            self.given_up.clear()
            self.scope_size = {}
            for slot in plan:
                self.scope_size[RENDEZVOUS_SCOPE] = slot.size
                self.scope_size[f"local_{slot.hostname}"] = slot.local_size
                self.scope_size[f"cross_{slot.local_rank}"] = slot.cross_size

    def read(self, scope: str, key: str, hold_s: float = 0) -> bytes | None:
        with self.lock:
            found = self.values[scope].get(key)
            if found is not None or not hold_s:
                return found
            # One event for each key, to wake only those that wait for it.
            awaited = self._awaited.setdefault((scope, key), threading.Event())
        awaited.wait(hold_s)
        with self.lock:
            return self.values[scope].get(key)

    def write(
        self, scope: str, key: str, value: bytes, *, if_absent: bool = False
    ) -> bytes:
        with self.lock:
            values = self.values[scope]
            values[key] = values.get(key, value) if if_absent else value
            awaited = self._awaited.pop((scope, key), None)
            if awaited is not None:
                awaited.set()
            return values[key]

    def report(self, rank: int, progress: Progress) -> JsonObject:
        """Record a rank's progress; return what it should know of others."""
        now = time.monotonic()
        with self.lock:
            last = self._reports.get(rank)
            is_same = last is not None and last.progress == progress
            since = last.since if last is not None and is_same else now
            self._reports[rank] = Report(now, since, progress)
            reports = dict(self._reports)
        # Others write to it meanwhile.
        states = list(self.gone.items())
        gone = dict(state for r, state in states if r != rank)
        return {
            "awaited": awaited_ranks(rank, reports),
            "apart": ranks_apart(rank, reports),
            "gone": gone,
        }

    def stop(self) -> None:
        """Stop the server."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log an error in a request."""
        # Usually the client has ended, which is reported elsewhere.
        logger.debug("request from %s", client_address, exc_info=True)


def awaited_ranks(rank: int, reports: Mapping[int, Report]) -> dict[str, str]:
    """The ranks for which a rank that has just reported waits, and why.

    They are late; or all ranks wait, and none has moved between two beats.

    Args:
        rank: the rank that waits.
        reports: each rank's last report.
    """
    mine = reports[rank].progress
    late = {}
    for other in _ranks_after(rank, mine.size):
        if other not in reports:
            late[other] = "has given no sign of life"
            continue
        its = reports[other].progress
        if reports[rank].arrived - reports[other].arrived > its.limit_s:
            late[other] = "has stopped giving signs of life"
        elif its.position < mine.position:
            late[other] = its.where
        elif its.position == mine.position and its.action != mine.action:
            # Equally far in different programs: each waits for the other.
            late[other] = its.where
    return _named(late or _all_that_wait(rank, reports))


def _ranks_after(rank: int, size: int) -> list[int]:
    """The other ranks at which a rank looks.

    In a large job these are only some of the ranks that follow it, so that a
    missing rank is reported by a limited number of ranks.
    """
    number = min(size, settings.MAX_RANKS_CHECKED + 1)
    return [(rank + after) % size for after in range(1, number)]


def _all_that_wait(rank: int, reports: Mapping[int, Report]) -> dict[int, str]:
    """The other ranks, if this one waits and none of the job moves."""
    mine = reports[rank].progress
    if not mine.waits or len(reports) < mine.size:
        return {}
    for report in reports.values():
        if not report.is_unchanged or report.progress.position < mine.position:
            return {}
    waiting = {}
    for other in _ranks_after(rank, mine.size):
        its = reports[other].progress
        is_there = its.waits and its.position == mine.position
        waiting[other] = "waits there, too" if is_there else its.where
    return waiting


def ranks_apart(rank: int, reports: Mapping[int, Report]) -> dict[str, str]:
    """A rank that has just reported, and those in exchanges it never meets.

    Args:
        rank: the rank that waits.
        reports: each rank's last report.

    Returns:
        What each of them does, by their names; empty if there are none.
    """
    mine = reports[rank]
    if not (mine.progress.exchanges and mine.is_unchanged):
        return {}
    others = _ranks_after(rank, mine.progress.size)
    if activity.SAVE in mine.progress.exchanges:
        # Only rank 0 saves; and it needs no error if this rank has one.
        others = [0]
    against = [
        other
        for other in others
        if other in reports
        and reports[other].is_unchanged
        and activity.SAVE not in reports[other].progress.exchanges
        and reports[other].progress.stands_against(mine.progress)
    ]
    if not against:
        return {}
    progress = {r: reports[r].progress for r in (rank, *against)}
    return _named({r: p.does or p.where for r, p in progress.items()})


def _named(ranks: Mapping[int, str]) -> dict[str, str]:
    """The first ranks by their names, and how many there are besides."""
    named = itertools.islice(sorted(ranks.items()), settings.MAX_RANKS_NAMED)
    reasons = {f"rank {other}": why for other, why in named}
    if len(ranks) > len(reasons):
        reasons[f"{len(ranks) - len(reasons)} more"] = "likewise"
    return reasons


class Handler(BaseHTTPRequestHandler):
    """Answers requests of processes that know the job's secret."""

    server: StoreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = settings.REQUEST_S

    def parse_request(self) -> bool:
        """Parse a request, and refuse it if it comes from outside the job."""
        if not super().parse_request():
            return False
        try:
            length = max(0, int(self.headers.get("Content-Length") or 0))
        except ValueError:
            length = 0
        prefix, _, path = self.path[1:].partition("/")
        expected = store.path_prefix(self.server.endpoint)
        if not store.is_equal(prefix, expected) or length > store.MAX_BYTES:
            self.rfile.read(min(length, _MAX_REFUSED_BYTES))
            return self._refuse()
        self.path, self._body = f"/{path}", self.rfile.read(length)
        self._scope, *keys = path.split("/")
        # The base class would serve files to HEAD.
        known = ("GET", "PUT", "POST", "DELETE")
        if self.command not in known or len(keys) != 1:
            return self._refuse()
        (self._key,) = keys
        if self._scope == SCOPE:
            secret = self.server.endpoint.secret
            expected = store.sign_request(
                secret, self.command, self.path, self._body
            )
            signature = self.headers.get(store.SIGNATURE, "")
            if not store.is_equal(signature, expected):
                return self._refuse()
        return True

    def do_GET(self) -> None:
        """Answer with a value."""
        server = self.server
        value = server.read(self._scope, self._key, self._hold_s())
        if value is None:
            return self._answer(_NOT_FOUND)
        self._answer(_OK, value)

    def do_POST(self) -> None:
        """Store a value if there is none; answer with the stored one.

        The answer to a report of progress is what a rank should know of others.
        """
        if self._scope == SCOPE and self._key.startswith(store.PROGRESS):
            rank = int(self._key.removeprefix(store.PROGRESS))
            progress = Progress(**json.loads(self._body))
            answer = self.server.report(rank, progress)
            return self._answer(_OK, json.dumps(answer).encode())
        stored = self.server.write(
            self._scope, self._key, self._body, if_absent=True
        )
        self._answer(_OK, stored)

    def do_PUT(self) -> None:
        """Store a value."""
        self.server.write(self._scope, self._key, self._body)
        ours = self._scope == SCOPE and self._key.startswith(store.CONNECTED)
        if ours or self._scope == RENDEZVOUS_SCOPE:
            # Horovod's key is the rank, without a prefix.
            rank = int(self._key.removeprefix(store.CONNECTED))
            self.server.on_connected(rank)
        self._answer(_OK)

    def do_DELETE(self) -> None:
        """Delete a value; a shared scope, once all its ranks have asked."""
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

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

    def _hold_s(self) -> float:
        """How long to wait for a missing value."""
        if self._scope.startswith(_RENDEZVOUS_SCOPES):
            # Horovod's clients would poll for ranks that have yet to arrive.
            return settings.HOLD_S
        return min(float(self._body or 0), settings.HOLD_S)

    def _refuse(self) -> bool:
        self._answer(_FORBIDDEN)
        return False

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        # A refused client must not get a signature for a path of its choice.
        if status == _OK:
            secret = self.server.endpoint.secret
            self.send_header(
                store.SIGNATURE,
                store.sign_answer(secret, self.command, self.path, body),
            )
        self.end_headers()
        self.wfile.write(body)
