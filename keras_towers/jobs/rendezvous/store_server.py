"""The server of a job's store, and the format of requests.

One thread answers all connections. It speaks the protocol of Horovod's
rendezvous server, for Horovod's clients: they connect for each request, and the
server closes the connection. Clients of this package keep one, in which they
wait, and make other requests meanwhile.

``POST`` is an addition: it writes a value if there is none, and returns the
stored one; it gives a rank's part of a value, and returns which ranks are
missing; it adds a rank's items to a value; it reports a rank's progress, and
returns which ranks are late, gone, or in other exchanges; or it waits until one
of some keys is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable

from keras_towers.foundation import settings
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import store, store_link
from keras_towers.jobs.rendezvous.local_store import (
    RENDEZVOUS_SCOPE,
    LocalStore,
)
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    is_equal,
    path_prefix,
    sign_answer,
    sign_request,
)
from keras_towers.jobs.rendezvous.store import Progress
from keras_towers.jobs.rendezvous.store_link import SCOPE

# How the scopes begin in which ranks of Horovod write their addresses: for all
# ranks, for the ranks of a host, and for all ranks with one local rank.
_RENDEZVOUS_SCOPES = (RENDEZVOUS_SCOPE, "local_", "cross_")
_REASONS = {200: "OK", 403: "Forbidden", 404: "Not Found"}
_OK, _FORBIDDEN, _NOT_FOUND = _REASONS
_REASONS[store_link.AWAITED] = "Awaited"
# All ranks may connect at once, and a client that the kernel turns away retries
# only after seconds. The kernel may allow fewer.
_WAITING_CONNECTIONS = 4096
_MAX_HEAD_BYTES = 16 << 10
# Read of a refused request, since a client reads no answer while it sends.
_MAX_REFUSED_BYTES = 64 << 10


class StoreServer(LocalStore):
    """The server of a job's store, in the process that owns it.

    Attributes:
        endpoint: where it listens.
        on_connected: called with the rank of each process that connects to its
            job.
        on_heartbeat: called with a rank and its sign of life.
        connections: those of its clients.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self, address: str, port: int = 0, secret: str | None = None
    ) -> None:
        super().__init__()
        self._listener = socket.create_server((address, port))
        if sys.platform == "linux":
            # The kernel keeps a connection until something comes on it, or for
            # this time: a client that is slow to ask takes no file meanwhile.
            self._listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, settings.SILENT_S
            )
        self.endpoint = Endpoint(
            address,
            int(self._listener.getsockname()[1]),
            secret or secrets.token_hex(32),
        )
        self.prefix: str = path_prefix(self.endpoint)
        self.on_connected: Callable[[int], None] = lambda rank: None
        self.on_heartbeat: Callable[[int, Hashable], None] = lambda *sign: None
        self.connections: set[_Connection] = set()
        self.loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Answer requests until the server is stopped."""
        loop = self.loop
        # Usually the client has ended, which is reported elsewhere.
        loop.set_exception_handler(
            lambda _, context: logger.debug("store: %s", context)
        )
        loop.run_until_complete(self._listen())
        loop.close()

    async def _listen(self) -> None:
        """Accept connections until the server is stopped; close them then."""
        listening = await self.loop.create_server(
            lambda: _Connection(self),
            sock=self._listener,
            backlog=_WAITING_CONNECTIONS,
        )
        self._end_late()
        await self._stopped.wait()
        # Those that are being accepted are not among them yet.
        while accepted := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(accepted)
        listening.close()
        for connection in [*self.connections]:
            connection.close()
        # It closes them when it runs next.
        await asyncio.sleep(0)

    def _end_late(self) -> None:
        """End requests that take too long, in all connections, repeatedly."""
        now = time.monotonic()
        for connection in [*self.connections]:
            connection.end_late(now)
        self.loop.call_later(settings.STORE_LOOK_S, self._end_late)

    def stop(self) -> None:
        """Stop the server, and close its connections."""
        self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _call_each(self, functions: Iterable[Callable[[], None]]) -> None:
        def call() -> None:
            for function in functions:
                function()

        self.loop.call_soon_threadsafe(call)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The head of a request.

    Attributes:
        method: the method.
        path: without the prefix of the job.
        length: the number of bytes of the body.
        signature: the signature; empty: there is none.
        is_kept: whether the client keeps its connection.
        is_ours: whether the request may come from the job, and is not too
            large.
    """

    method: str
    path: str
    length: int
    signature: str
    is_kept: bool
    is_ours: bool


def _parse(head: bytes, job: str) -> _Head:
    """Parse the head of a request to the job with this path prefix."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    method, _, rest = first.partition(" ")
    target, _, _ = rest.partition(" ")
    prefix, _, path = target[1:].partition("/")
    length = 0
    with contextlib.suppress(ValueError):
        length = max(0, int(headers.get("content-length", 0)))
    return _Head(
        method,
        f"/{path}",
        length,
        headers.get(SIGNATURE.lower(), ""),
        headers.get("connection", "").lower() == "keep-alive",
        is_equal(prefix, job) and length <= store_link.MAX_BYTES,
    )


class _Connection(asyncio.Protocol):
    """A connection and its requests, which are answered in order.

    A request that waits does not hold up the others.

    The connection is closed if the rest of a request does not arrive in time,
    or if its client does not read the answer.
    """

    def __init__(self, server: StoreServer):
        self._server = server
        self._received = bytearray()
        # The request whose body has not arrived.
        self._head: _Head | None = None
        # The keys for which the client waits; what ends that; and when.
        self._places: list[tuple[str, str]] = []
        self._end_wait: Callable[[], None] | None = None
        self._waits_until = 0.0
        # When the connection ends, by ``time.monotonic``, as that does.
        self._until = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        self._limit(settings.REQUEST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._stop_waiting()

    def close(self) -> None:
        """Close the connection, once all answers are sent."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._received and self._head is None:
            self._limit(settings.REQUEST_S)
        self._received += data
        self._advance()

    def _limit(self, seconds: float) -> None:
        """Set the time until the next part of a request, or its end."""
        self._until = time.monotonic() + seconds

    def end_late(self, now: float) -> None:
        """End a request that has taken too long."""
        if self._end_wait is not None and now >= self._waits_until:
            self._end_wait()
        if now >= self._until:
            self._transport.abort()

    def _advance(self) -> None:
        """Answer the requests that have arrived."""
        try:
            while not self._transport.is_closing():
                request = self._next_request()
                if request is None:
                    return
                self._answer_request(*request)
        except Exception:
            # Not what a client of this package sends.
            logger.debug("a request to the store", exc_info=True)
            self._transport.abort()

    def _next_request(self) -> tuple[_Head, bytes] | None:
        """Take the next request from the bytes; None: it is incomplete."""
        received, head = self._received, self._head
        if head is None:
            end = received.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
            if end < 0 and len(received) < _MAX_HEAD_BYTES:
                return None
            # A head that is too long is not from our clients.
            head = _parse(bytes(received[: max(end, 0)]), self._server.prefix)
            del received[: end + 4]
            self._head = head
        most = store_link.MAX_BYTES if head.is_ours else _MAX_REFUSED_BYTES
        length = min(head.length, most)
        if len(received) < length:
            self._limit(settings.REQUEST_S)
            return None
        body = bytes(received[:length])
        del received[:length]
        self._head = None
        return head, body

    def _answer_request(self, head: _Head, body: bytes) -> None:
        server = self._server
        scope, *keys = head.path[1:].split("/")
        if not head.is_ours or len(keys) != 1:
            return self._refuse()
        if scope == SCOPE:
            expected = sign_request(
                server.endpoint.secret, head.method, head.path, body
            )
            if not is_equal(head.signature, expected):
                return self._refuse()
        (key,) = keys
        if head.method == "GET":
            return self._answer_value(head, scope, key)
        if head.method == "PUT":
            self._put(scope, key, body)
            return self._answer(head, b"")
        if head.method == "POST" and (scope, key) == (SCOPE, store_link.ANY):
            return self._answer_any(head, body)
        if head.method == "POST":
            return self._answer(head, self._post(scope, key, body))
        if head.method == "DELETE":
            server.delete(scope, key)
            return self._answer(head, b"")
        self._refuse()

    def _answer_value(self, head: _Head, scope: str, key: str) -> None:
        """Answer with a value."""
        read = functools.partial(self._server.read, scope, key)
        answer = functools.partial(self._answer, head)
        if scope.startswith(_RENDEZVOUS_SCOPES):
            # Horovod's clients would poll for ranks that have yet to arrive.
            self._answer_later([(scope, key)], settings.HOLD_S, read, answer)
        else:
            answer(read())

    def _answer_any(self, head: _Head, body: bytes) -> None:
        """Answer with the existing ones of some keys, when there is one."""
        places = [tuple(place.split("/", 1)) for place in json.loads(body)]

        def found() -> bytes | None:
            read = self._server.read
            there = [
                f"{scope}/{key}"
                for scope, key in places
                if read(scope, key) is not None
            ]
            return json.dumps(there).encode() if there else None

        def answer(there: bytes | None) -> None:
            self._answer(head, there or b"[]", store_link.AWAITED)

        self._answer_later(places, settings.LISTEN_S, found, answer)

    def _answer_later(
        self,
        places: list[tuple[str, str]],
        hold_s: float,
        read: Callable[[], bytes | None],
        answer: Callable[[bytes | None], None],
    ) -> None:
        """Answer with a value when it exists.

        Or when the time is over; not at all if the client waits for something
        else before.
        """
        self._stop_waiting()
        value = read()
        if value is not None:
            return answer(value)

        def end() -> None:
            # Another may have been begun since this one was to end.
            if self._end_wait is end:
                self._stop_waiting()
                answer(read())

        self._places, self._end_wait = places, end
        self._waits_until = time.monotonic() + hold_s
        self._limit(settings.LOST_S)
        for scope, key in places:
            self._server.await_key(scope, key, end)

    def _stop_waiting(self) -> None:
        if self._end_wait is not None:
            for scope, key in self._places:
                self._server.forget(scope, key, self._end_wait)
            self._end_wait = None

    def _put(self, scope: str, key: str, body: bytes) -> None:
        """Store a value, and handle its meaning for the server."""
        server = self._server
        server.write(scope, key, body)
        ours = scope == SCOPE
        if ours and key.startswith(store.HEARTBEAT):
            rank = int(key.removeprefix(store.HEARTBEAT))
            server.on_heartbeat(rank, json.loads(body))
        elif scope == RENDEZVOUS_SCOPE or (
            ours and key.startswith(store.CONNECTED)
        ):
            # Horovod's key is the rank, without a prefix.
            server.on_connected(int(key.removeprefix(store.CONNECTED)))

    def _post(self, scope: str, key: str, body: bytes) -> bytes:
        """Return the answer to a report, a contribution, or a value."""
        server = self._server
        if scope == SCOPE and key.startswith(store.PROGRESS):
            rank = int(key.removeprefix(store.PROGRESS))
            others = server.report(rank, Progress(**json.loads(body)))
            return json.dumps(others).encode()
        if scope == SCOPE and key.startswith(store.CONTRIBUTIONS):
            whole = key.removeprefix(store.CONTRIBUTIONS)
            missing = server.give(whole, *json.loads(body))
            return json.dumps([missing.some, missing.number]).encode()
        if scope == SCOPE and key.startswith(store.ADDED):
            server.add(key.removeprefix(store.ADDED), *json.loads(body))
            return b""
        return server.write(scope, key, body, if_absent=True)

    def _refuse(self) -> None:
        # A refused client must not get a signature for a path of its choice.
        self._send(_FORBIDDEN, b"", "", is_kept=False)

    def _answer(
        self, head: _Head, body: bytes | None, status: int = _OK
    ) -> None:
        """Answer with a value; None: there is none."""
        if body is None:
            return self._send(_NOT_FOUND, b"", "", head.is_kept)
        secret = self._server.endpoint.secret
        signature = sign_answer(secret, head.method, head.path, body)
        self._send(status, body, signature, head.is_kept)

    def _send(
        self, status: int, body: bytes, signature: str, is_kept: bool
    ) -> None:
        head = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Length: {len(body)}",
            f"Connection: {'keep-alive' if is_kept else 'close'}",
        ]
        if signature:
            head.append(f"{SIGNATURE}: {signature}")
        text = "\r\n".join((*head, "", ""))
        self._transport.write(text.encode() + body)
        # Until the next request, or until the client has read all of this.
        self._limit(settings.LOST_S)
        if not is_kept:
            self._transport.close()
