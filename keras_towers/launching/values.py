"""A server of values by name, as Horovod's clients and ours ask it.

The interface is that of Horovod's rendezvous: ``PUT /scope/key`` leaves a
value, ``GET`` reads it, ``DELETE`` says that the asking rank needs it no more.
No file is ever served.
"""

from __future__ import annotations

import collections
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger: logging.Logger = logging.getLogger("keras_towers")

# The longest wait for the rest of a request.
_REQUEST_S = 3
_OK, _NOT_FOUND = 200, 404


class Values(ThreadingHTTPServer):
    """Values by scope and key.

    It has the attributes of Horovod's server, whose elastic handler uses them.

    Args:
        address: where to listen: a host's address, and a port or 0.
        handler: answers a request.

    Attributes:
        cache: the values.
        cache_lock: to be held by who uses them.
        scope_size: of the scopes that ranks give up together, how many do.
        finished_list: those that have.
        finished_list_lock: to be held by who uses it.
        verbose: whether to log more.

    Raises:
        OSError: it cannot listen there.
    """

    verbose = False

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
    ):
        super().__init__(address, handler)
        self.cache: dict[str, dict[str, bytes]] = {}
        self.cache_lock = threading.Lock()
        self.scope_size: dict[str, int] = {}
        self.finished_list: dict[str, list[str]] = collections.defaultdict(list)
        self.finished_list_lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Take note of an error while a request was answered."""
        # As a rule who asked is gone, which is said where it is noticed.
        logger.debug("request from %s", client_address, exc_info=True)

    def restart(self, scopes: dict[str, int]) -> None:
        """Forget all values.

        Args:
            scopes: those that ranks give up together, and how many do.
        """
        with self.cache_lock, self.finished_list_lock:
            self.cache.clear()
            self.finished_list.clear()
            self.scope_size = scopes


class ValuesHandler(BaseHTTPRequestHandler):
    """Answers one request to ``Values``; its path is a scope and a key."""

    timeout = _REQUEST_S

    def do_GET(self) -> None:
        """Answer with a value."""
        value = self._get_value(*self._names())
        self._answer(_NOT_FOUND if value is None else _OK, value or b"")

    def do_PUT(self) -> None:
        """Take a value."""
        length = int(self.headers.get("Content-Length") or 0)
        self._put_value(*self._names(), self.rfile.read(length))
        self._answer(_OK)

    def do_DELETE(self) -> None:
        """Forget a value; of a scope given up together, when all have."""
        scope, key = self._names()
        server = self._values
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
        self._answer(_OK)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nothing to tell of."""

    def send_status_code(self, status_code: int) -> None:
        """Answer with nothing but a status."""
        self._answer(status_code)

    @property
    def _values(self) -> Values:
        assert isinstance(self.server, Values)
        return self.server

    def _names(self) -> tuple[str, str]:
        scope, _, key = self.path[1:].partition("/")
        return scope, key

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _get_value(self, scope: str, key: str) -> bytes | None:
        with self._values.cache_lock:
            return self._values.cache.get(scope, {}).get(key)

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        with self._values.cache_lock:
            self._values.cache.setdefault(scope, {})[key] = value
