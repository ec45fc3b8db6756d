"""The server of a job's store, on one address, for the job's own processes.

It answers as Horovod's does, whose clients ask it: ``PUT /scope/key`` leaves a
value, ``GET`` reads it, ``DELETE`` says that the asking rank needs it no more.
No file is ever served.
"""

from __future__ import annotations

import collections
import io
import json
import logging
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from keras_towers import settings
from keras_towers.meeting.store import (
    CONNECTED,
    SCOPE,
    SIGNATURE,
    Endpoint,
    new_secret,
    same,
    sign,
    token,
)

logger: logging.Logger = logging.getLogger("keras_towers")

MEETING_SCOPE = "global"
"""The scope in which each rank of Horovod first leaves its address."""
_OK, _FORBIDDEN, _NOT_FOUND = 200, 403, 404
# Of a refused request: a client that is still sending would see no answer.
_READ_AT_MOST = 64 << 10


class StoreServer(ThreadingHTTPServer):
    """A job's store, as a ``Store`` for the process that serves it.

    On loopback, only users of this machine can get at the job, and without its
    secret they are refused. Horovod's elastic handler uses the attributes of
    the server, which have the names of Horovod's.

    Args:
        address: the address of this machine to listen at; empty: all.
        secret: the job's; None: a new one.
    """

    verbose = False

    def __init__(
        self,
        address: str,
        secret: str | None = None,
        on_connected: Callable[[int], None] = lambda rank: None,
    ):
        super().__init__((address, 0), Handler, bind_and_activate=False)
        self.begin_round: Callable[[Sequence[Any]], None] = lambda plan: None
        self.secret: str = secret or new_secret()
        self.on_connected = on_connected
        self.cache: dict[str, dict[str, bytes]] = {}
        self.cache_lock = threading.Lock()
        self.scope_size: dict[str, int] = {}
        self.finished_list: dict[str, list[str]] = collections.defaultdict(list)
        self.finished_list_lock = threading.Lock()
        self._serves = False

    def start(
        self, handler: type[BaseHTTPRequestHandler] | None = None, port: int = 0
    ) -> Endpoint:
        """Listen.

        Args:
            handler: a ``Guard`` that answers requests; None: ``Handler``.
            port: where to listen; 0: anywhere.
        """
        address = str(self.server_address[0])
        self.server_address = address, port
        self.RequestHandlerClass = handler or Handler
        try:
            self.server_bind()
            self.server_activate()
        except OSError:
            self.server_close()
            raise
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self._serves = True
        return Endpoint(address, int(self.server_address[1]), self.secret)

    def init(self, host_alloc_plan: Sequence[Any]) -> None:
        """Forget all values and let ranks meet; the name is Horovod's.

        Args:
            host_alloc_plan: the ``Slot`` of each, or Horovod's ``SlotInfo``.
        """
        scopes: dict[str, int] = {}
        for slot in host_alloc_plan:
            scopes[MEETING_SCOPE] = slot.size
            scopes[f"local_{slot.hostname}"] = slot.local_size
            scopes[f"cross_{slot.local_rank}"] = slot.cross_size
        with self.cache_lock, self.finished_list_lock:
            self.cache.clear()
            self.finished_list.clear()
            self.scope_size = scopes
        self.begin_round(host_alloc_plan)

    def get(self, key: str) -> Any:
        with self.cache_lock:
            text = self.cache.get(SCOPE, {}).get(key)
        return None if text is None else json.loads(text)

    def put(self, key: str, value: Any) -> None:
        with self.cache_lock:
            scope = self.cache.setdefault(SCOPE, {})
            scope[key] = json.dumps(value).encode()

    def stop(self) -> None:
        """Answer no more."""
        if self._serves:
            self.shutdown()
            self._serves = False
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note an error in an answer."""
        # As a rule who asked is gone, which is said where it is noticed.
        logger.debug("request from %s", client_address, exc_info=True)


class Guard(BaseHTTPRequestHandler):
    """Lets those who know the job's secret ask another handler, its base."""

    server: StoreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    _found: bytes | None = None

    def parse_request(self) -> bool:
        """Read a request, and refuse it if it is not the job's."""
        if not super().parse_request():
            return False
        try:
            length = max(0, int(self.headers.get("Content-Length") or 0))
        except ValueError:
            length = 0
        begin, _, path = self.path[1:].partition("/")
        # Behind the token Horovod's clients put the port once more.
        wanted = f"{token(self.server.secret)}:{self.server.server_address[1]}"
        if not same(begin, wanted):
            return self._refuse(length)
        self.path = f"/{path}"
        body = self.rfile.read(length)
        scope, *keys = path.split("/")
        # There is nothing for HEAD to do but to look for a file.
        if self.command not in ("GET", "PUT", "DELETE") or len(keys) != 1:
            return self._refuse()
        if scope == SCOPE:
            right = sign(self.server.secret, self.command, self.path, body)
            if not same(self.headers.get(SIGNATURE, ""), right):
                return self._refuse()
        self.rfile = io.BytesIO(body)
        return True

    def end_headers(self) -> None:
        """Sign the answer."""
        if self._found is not None:
            signature = sign(
                self.server.secret, "ANSWER", self.path, self._found
            )
            self.send_header(SIGNATURE, signature)
        super().end_headers()

    def _get_value(self, scope: str, key: str) -> bytes | None:
        self._found = super()._get_value(scope, key)  # type: ignore[misc]
        return self._found

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        super()._put_value(scope, key, value)  # type: ignore[misc]
        if scope == MEETING_SCOPE or (
            scope == SCOPE and key.startswith(CONNECTED)
        ):
            self.server.on_connected(rank_of(key))

    def _refuse(self, unread: int = 0) -> bool:
        self.rfile.read(min(unread, _READ_AT_MOST))
        _answer(self, _FORBIDDEN)
        return False


def rank_of(key: str) -> int:
    """The rank in a key: ``rank_3``, or as Horovod has it later, ``3``."""
    return int(key.removeprefix(CONNECTED))


def _answer(
    handler: BaseHTTPRequestHandler, status: int, body: bytes = b""
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class _Values(BaseHTTPRequestHandler):
    """Answers one request to a ``StoreServer``: a scope and a key."""

    server: StoreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = settings.REQUEST_S

    def do_GET(self) -> None:
        """Answer with a value."""
        value = self._get_value(*self._names())
        _answer(self, _NOT_FOUND if value is None else _OK, value or b"")

    def do_PUT(self) -> None:
        """Take a value."""
        length = int(self.headers.get("Content-Length") or 0)
        self._put_value(*self._names(), self.rfile.read(length))
        _answer(self, _OK)

    def do_DELETE(self) -> None:
        """Forget a value; of a scope given up together, when all have."""
        scope, key = self._names()
        server = self.server
        with server.cache_lock, server.finished_list_lock:
            values = server.cache.get(scope, {})
            size = server.scope_size.get(scope)
            if size is None:
                values.pop(key, None)
            else:
                server.finished_list[scope].append(key)
                if len(server.finished_list[scope]) == size:
                    values.clear()
                    del server.finished_list[scope]
        _answer(self, _OK)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nothing to tell of."""

    def _names(self) -> tuple[str, str]:
        scope, _, key = self.path[1:].partition("/")
        return scope, key

    def _get_value(self, scope: str, key: str) -> bytes | None:
        with self.server.cache_lock:
            return self.server.cache.get(scope, {}).get(key)

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        with self.server.cache_lock:
            self.server.cache.setdefault(scope, {})[key] = value


class Handler(Guard, _Values):
    """Answers the processes of a job."""
