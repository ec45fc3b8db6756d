"""Horovod's rendezvous server, on one address, for the job's own ranks."""

from __future__ import annotations

import importlib
import io
import ipaddress
import json
import logging
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.launching.rounds import Rounds
from keras_towers.rendezvous import (
    SCOPE,
    SIGNATURE,
    come,
    same,
    sign,
    token,
)

logger: logging.Logger = logging.getLogger("keras_towers")

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


def rendezvous_server(
    address: str, secret: str, on_come: Callable[[int], None] | None = None
) -> Any:
    """Horovod's ``RendezvousServer``, reachable at ``address`` alone.

    Horovod's listens on all addresses of the machine and asks nobody who they
    are. On loopback, only users of this machine can get at the job, and without
    its secret they are refused.

    Args:
        address: the address of this machine that ranks meet at.
        secret: the job's.
        on_come: called from another thread with each rank that connects.
    """
    http_server = horovod("runner.http.http_server")

    class _HTTPServer(
        http_server.RendezvousHTTPServer  # type: ignore[name-defined]
    ):
        # A worker that waits for the others must not hold up the exit.
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            # As a rule who asked is gone, which is said where it is noticed.
            logger.debug("request from %s", client_address, exc_info=True)

    class _Server(http_server.RendezvousServer):  # type: ignore[name-defined]
        _httpd: _HTTPServer | None

        def start(self, handler_cls=http_server.RendezvousHandler, port=0):
            self._httpd = _HTTPServer(
                (address, port),
                guarded(_noting(handler_cls, on_come), secret),
                self._verbose,
            )
            self._listen_thread = threading.Thread(
                target=self._httpd.serve_forever, daemon=True
            )
            self._listen_thread.start()
            return self._httpd.server_address[1]

        def init(self, host_alloc_plan):
            super().init(host_alloc_plan)
            self.begin_round(host_alloc_plan)

        def begin_round(self, plan: Any) -> None:
            """Take note of a round of an elastic job."""

        def put(self, key: str, value: Any) -> None:
            """Leave word for the ranks, until the next round."""
            assert self._httpd is not None  # It has been started.
            with self._httpd.cache_lock:
                scope = self._httpd.cache.setdefault(SCOPE, {})
                scope[key] = json.dumps(value).encode()

        def get(self, key: str) -> Any:
            """What a rank has left word of, None if nothing."""
            assert self._httpd is not None  # It has been started.
            with self._httpd.cache_lock:
                said = self._httpd.cache.get(SCOPE, {}).get(key)
            return None if said is None else json.loads(said)

        def stop(self):
            if self._httpd is not None:
                super().stop()
                self._httpd.server_close()
                self._httpd = None

    return _Server(False)


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
        base: Horovod's handler, or one made from it.
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
