"""The server of a job's store, and the format of requests.

One thread answers all connections, in the protocol of Horovod's rendezvous
server, for Horovod's clients: a client connects for each request, and the
server closes the connection when it has answered.

For clients of this package, ``GET`` can wait for a value that is missing, and
``POST`` calls a method of the store.
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
from collections.abc import Callable
from http import HTTPStatus

from keras_towers.foundation import settings
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import store
from keras_towers.jobs.rendezvous.local_store import (
    RENDEZVOUS_SCOPE,
    LocalStore,
)
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    is_equal,
)
from keras_towers.jobs.rendezvous.store import SCOPE

# How the scopes begin in which ranks of Horovod write their addresses: for all
# ranks, for the ranks of a host, and for all ranks with one local rank.
_RENDEZVOUS_SCOPES = (RENDEZVOUS_SCOPE, "local_", "cross_")
_SERVED_METHODS = ("setdefault", "add", "report")
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
        self.prefix: str = self.endpoint.prefix
        self.on_connected: Callable[[int], None] = lambda rank: None
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
        await self._stopped.wait()
        # Those that are being accepted are not among them yet.
        while accepted := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(accepted)
        listening.close()
        for connection in [*self.connections]:
            connection.close()
        # It closes them when it runs next.
        await asyncio.sleep(0)

    def stop(self) -> None:
        """Stop the server, and close its connections."""
        self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()


@dataclasses.dataclass(frozen=True)
class _Head:
    """The head of a request.

    Attributes:
        method: the method.
        path: without the prefix of the job.
        length: the number of bytes of the body.
        signature: the signature; empty: there is none.
        is_ours: whether the request may come from the job, and is not too
            large.
    """

    method: str
    path: str
    length: int
    signature: str
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
        is_equal(prefix, job) and length <= store.MAX_BYTES,
    )


class _Connection(asyncio.Protocol):
    """A connection, on which a client makes one request.

    It is closed if the rest of the request does not arrive in time, or if its
    client does not read the answer.
    """

    def __init__(self, server: StoreServer):
        self._server = server
        self._received = bytearray()
        # None: it has not arrived.
        self._head: _Head | None = None
        self._is_whole = False
        self._stop_waiting: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        self._timer = self._server.loop.call_later(
            settings.REQUEST_S, transport.abort
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._timer.cancel()
        self._stop_waiting()

    def close(self) -> None:
        """Close the connection, once the answer is sent."""
        self._transport.close()

    def _limit(self, seconds: float, end: Callable[[], None]) -> None:
        """Set what ends the wait for the client, or for a value, and when."""
        self._timer.cancel()
        self._timer = self._server.loop.call_later(seconds, end)

    def data_received(self, data: bytes) -> None:
        self._received += data
        # What follows the request is not read.
        if not self._is_whole:
            try:
                self._take_request()
            except Exception:
                # Not what a client of this package sends.
                logger.debug("a request to the store", exc_info=True)
                self._transport.abort()

    def _take_request(self) -> None:
        """Answer the request if all of it has arrived."""
        received, head = self._received, self._head
        if head is None:
            end = received.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
            if end < 0 and len(received) < _MAX_HEAD_BYTES:
                return
            # A head that is too long is not from our clients.
            head = _parse(bytes(received[: max(end, 0)]), self._server.prefix)
            del received[: end + 4]
            self._head = head
        most = store.MAX_BYTES if head.is_ours else _MAX_REFUSED_BYTES
        length = min(head.length, most)
        if len(received) < length:
            self._limit(settings.REQUEST_S, self._transport.abort)
            return
        self._is_whole = True
        self._answer_request(head, bytes(received[:length]))

    def _answer_request(self, head: _Head, body: bytes) -> None:
        server = self._server
        path, _, hold_s = head.path.partition(store.HOLD)
        scope, *keys = path[1:].split("/")
        is_signed = scope != SCOPE or is_equal(
            head.signature,
            server.endpoint.sign_request(head.method, head.path, body),
        )
        if not head.is_ours or not is_signed or len(keys) != 1:
            return self._refuse()
        (key,) = keys
        if head.method == "GET":
            # Horovod's clients would poll for ranks that have yet to arrive.
            polls = scope.startswith(_RENDEZVOUS_SCOPES)
            wait_s = settings.HOLD_S if polls else float(hold_s or 0)
            read = functools.partial(server.read, scope, key)
            return self._answer_later(head, scope, key, wait_s, read)
        if head.method == "PUT":
            self._put(scope, key, body)
            return self._answer(head, b"")
        is_call = head.method == "POST" and scope == SCOPE
        if is_call and key == "give":
            return self._give(head, *json.loads(body))
        if is_call and key in _SERVED_METHODS:
            result = getattr(server, key)(*json.loads(body))
            return self._answer(head, json.dumps(result).encode())
        if head.method == "DELETE":
            server.delete(scope, key)
            return self._answer(head, b"")
        self._refuse()

    def _give(
        self,
        head: _Head,
        key: str,
        rank: int,
        size: int,
        value: object,
        hold_s: float,
        awaited: str,
    ) -> None:
        """Take a rank's part of a list, and answer when a value is there."""
        server, awaited = self._server, awaited or key

        def answer() -> bytes:
            missing = server.contribute(key, rank, size, value)
            # As it is stored: a list of all ranks' parts may be long.
            found = server.read(SCOPE, awaited) or b"null"
            return b"[%b, %b]" % (json.dumps(missing).encode(), found)

        server.contribute(key, rank, size, value)
        self._answer_later(head, SCOPE, awaited, hold_s, answer)

    def _answer_later(
        self,
        head: _Head,
        scope: str,
        key: str,
        hold_s: float,
        read: Callable[[], bytes | None],
    ) -> None:
        """Answer when a value is there, or when the time is over.

        Args:
            head: the head of the request.
            scope: the scope of the value.
            key: its key.
            hold_s: the time.
            read: returns the answer.
        """
        server, place = self._server, (scope, key)

        def end() -> None:
            # The value may be written just as the time is over.
            if not self._transport.is_closing():
                self._answer(head, read())

        if not hold_s or server.read(*place) is not None:
            return end()

        def wake() -> None:
            server.loop.call_soon_threadsafe(end)

        self._limit(hold_s, end)
        self._stop_waiting = functools.partial(server.forget, *place, wake)
        server.await_key(*place, wake)

    def _put(self, scope: str, key: str, body: bytes) -> None:
        """Store a value, and handle its meaning for the server."""
        server = self._server
        server.write(scope, key, body)
        is_ours = scope == SCOPE and key.startswith(store.CONNECTED)
        if is_ours or scope == RENDEZVOUS_SCOPE:
            # Horovod's key is the rank, without a prefix.
            server.on_connected(int(key.removeprefix(store.CONNECTED)))

    def _refuse(self) -> None:
        # A refused client must not get a signature for a path of its choice.
        self._send(HTTPStatus.FORBIDDEN)

    def _answer(self, head: _Head, body: bytes | None) -> None:
        """Answer with a value; None: there is none."""
        if body is None:
            return self._send(HTTPStatus.NOT_FOUND)
        endpoint = self._server.endpoint
        signature = endpoint.sign_answer(head.method, head.path, body)
        self._send(HTTPStatus.OK, body, f"{SIGNATURE}: {signature}")

    def _send(
        self, status: HTTPStatus, body: bytes = b"", *headers: str
    ) -> None:
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
        )
        self._transport.write("\r\n".join((*head, "", "")).encode() + body)
        # Until the client has read all of this.
        self._limit(settings.LOST_S, self._transport.abort)
        self._transport.close()
