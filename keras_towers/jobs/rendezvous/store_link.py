"""The connection of a process to the store of its job.

``store.py`` makes requests through it; ``store_server.py`` answers them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    is_equal,
    path_prefix,
    sign_answer,
    sign_request,
)

ANY = "any-of"
"""The key under which a client asks which of some keys there are."""
SCOPE = "keras_towers"
"""The scope of this package's keys; other scopes are Horovod's."""
MAX_BYTES: int = 16 << 20
"""Largest value. A signature covers it, so it is read before it is known who
sends it."""
AWAITED = 290
"""The status of an answer to a request for any of some keys. It comes when one
of them is there, beside the answers to other requests, which come in turn."""
_ANY = f"/{SCOPE}/{ANY}"
_OK, _NOT_FOUND = 200, 404
_MAX_LINE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Request:
    method: str
    path: str
    answer: Future[bytes | None] = dataclasses.field(default_factory=Future)


_WAIT = _Request("POST", _ANY)


class StoreLink:
    """A connection to a store, which all threads of a process share.

    The server answers requests in turn. It holds the requests of waiting
    threads: one request for any of several keys, which replaces the one before.
    The connection is closed when no thread has asked or waited for a moment.

    Args:
        endpoint: the store.
    """

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        # The requests without an answer yet.
        self._requests: collections.deque[_Request] = collections.deque()
        # By scope and key, what threads wait for; set when it may be there.
        self._awaited: dict[str, set[threading.Event]] = {}
        # Whether the server holds a request for that.
        self._is_held = False
        # When a part of an answer has come, by ``time.monotonic``.
        self._heard = 0.0

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes | None:
        """Make a request; return the answer, or None: there is no value.

        Raises:
            OSError: the store does not answer, or it is not the store.
        """
        request, limit_s = _Request(method, path), settings.STORE_ANSWER_S
        with self._lock:
            self._requests.append(request)
            self._send(method, path, body)
        while True:
            try:
                return request.answer.result(limit_s)
            except TimeoutError:
                # A long answer may be on its way.
                if time.monotonic() - self._heard > limit_s:
                    self._hang_up()
                    raise

    def wait(self, place: str, limit_s: float) -> None:
        """Wait until a key exists, the store is gone, or the limit has passed.

        Args:
            place: the scope and the key.
            limit_s: the limit.

        Raises:
            OSError: nobody listens at the address of the store.
        """
        is_there = threading.Event()
        try:
            with self._lock:
                self._awaited.setdefault(place, set()).add(is_there)
                self._ask_for_any()
            is_there.wait(limit_s)
        finally:
            with self._lock:
                events = self._awaited.get(place, set())
                events.discard(is_there)
                if not events:
                    self._awaited.pop(place, None)

    def _ask_for_any(self) -> None:
        self._send(
            _WAIT.method, _WAIT.path, json.dumps([*self._awaited]).encode()
        )
        self._is_held = True

    def _send(self, method: str, path: str, body: bytes) -> None:
        """Send a request, under the lock."""
        self._lock.notify_all()
        link = self._socket or self._connect()
        link.sendall(encode_request(self._endpoint, method, path, body))

    def _connect(self) -> socket.socket:
        address = self._endpoint.address, self._endpoint.port
        try:
            link = socket.create_connection(address, settings.STORE_ANSWER_S)
        except OSError:
            self._requests.clear()
            raise
        link.settimeout(settings.LISTEN_S + settings.STORE_ANSWER_S)
        self._socket = link
        threading.Thread(
            target=self._read_answers,
            args=(link,),
            name="keras-towers-store",
            daemon=True,
        ).start()
        return link

    def _read_answers(self, link: socket.socket) -> None:
        """Read answers until nobody asks or waits any more."""
        with link, link.makefile("rb") as file:
            try:
                while self._socket is link:
                    is_awaited, content = self._read_answer(file)
                    with self._lock:
                        self._deliver(is_awaited, content)
            except OSError as error:
                with self._lock:
                    self._socket, self._is_held = None, False
                    failed = [*self._requests]
                    self._requests.clear()
                    # They ask for themselves, and see why.
                    self._wake([*self._awaited])
                for request in failed:
                    request.answer.set_exception(error)

    def _deliver(self, is_awaited: bool, content: bytes | None) -> None:
        if is_awaited:
            self._is_held = False
            self._wake(json.loads(content or b"[]"))
        else:
            self._requests.popleft().answer.set_result(content)
        if self._awaited and not self._is_held:
            self._ask_for_any()
        idle_s = settings.STORE_IDLE_S
        if not self._lock.wait_for(self._expects_answers, idle_s):
            self._socket = None

    def _expects_answers(self) -> bool:
        return self._is_held or bool(self._requests)

    def _wake(self, places: Sequence[str]) -> None:
        for place in places:
            for event in self._awaited.pop(place, ()):
                event.set()

    def _read_answer(
        self, file: io.BufferedReader
    ) -> tuple[bool, bytes | None]:
        """Read an answer: whether it is the awaited one, and its content."""
        first = file.readline(_MAX_LINE_BYTES)
        if not first:
            raise ConnectionResetError("the store has closed the connection")
        parts = []
        try:
            status = int(first.split()[1])
            is_awaited = status == AWAITED
            request = _WAIT if is_awaited else self._requests[0]
            headers = http.client.parse_headers(file)
            left = int(headers.get("Content-Length", MAX_BYTES))
            while left > 0 and (part := file.read1(left)):
                parts.append(part)
                left -= len(part)
                self._heard = time.monotonic()
        except (http.client.HTTPException, ValueError, IndexError) as error:
            raise OSError(f"this is no answer of a store: {error!r}") from error
        if status == _NOT_FOUND:
            return False, None
        if status not in (_OK, AWAITED):
            raise OSError(f"the store answers {status}")
        content = b"".join(parts)
        expected = sign_answer(
            self._endpoint.secret, request.method, request.path, content
        )
        if not is_equal(headers.get(SIGNATURE, ""), expected):
            raise OSError("the answer's signature is wrong")
        return is_awaited, content

    def _hang_up(self) -> None:
        """Close the connection; its requests fail."""
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)


def encode_request(
    endpoint: Endpoint, method: str, path: str, body: bytes
) -> bytes:
    """Return a signed request.

    Args:
        endpoint: the store.
        method: the method.
        path: the scope and the key, each after a slash.
        body: what is sent.
    """
    head = (
        f"{method} /{path_prefix(endpoint)}{path} HTTP/1.1",
        f"Host: {endpoint.address}:{endpoint.port}",
        f"{SIGNATURE}: {sign_request(endpoint.secret, method, path, body)}",
        f"Content-Length: {len(body)}",
        "Connection: keep-alive",
    )
    return "\r\n".join((*head, "", "")).encode() + body
