"""Horovod's rendezvous server, on one address, patient with slow starters."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from keras_towers.errors import TowerError

# Where each rank first leaves its address for the others.
_FIRST_SCOPE = "global"
_POLL_S = 0.02


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


def rendezvous_server(address: str) -> Any:
    """Horovod's ``RendezvousServer``, reachable at ``address`` alone.

    Horovod's listens on all addresses of the machine and asks nobody who they
    are; on loopback, only users of this machine can get at the job.
    """
    http_server = horovod("runner.http.http_server")

    class _Server(http_server.RendezvousServer):  # type: ignore[name-defined]
        def start(self, handler_cls=http_server.RendezvousHandler):
            self._httpd = http_server.RendezvousHTTPServer(
                (address, 0), handler_cls, self._verbose
            )
            # A worker that waits for the others must not hold up the exit.
            self._httpd.daemon_threads = True
            self._listen_thread = threading.Thread(
                target=self._httpd.serve_forever, daemon=True
            )
            self._listen_thread.start()
            return self._httpd.server_address[1]

        def stop(self):
            if self._httpd is not None:
                super().stop()
                self._httpd.server_close()
                self._httpd = None

    return _Server(False)


def waiting_handler(base: Any, complete: Callable[[], bool]) -> Any:
    """Horovod's handler, which answers nobody before all have come.

    How long ranks wait for one another to start and how long for one that has
    died in the middle of a reduction is one setting of Horovod. Here the first
    wait is the server's, so that the second can be short.

    Args:
        base: the handler.
        complete: whether all ranks that are expected still run.
    """

    class _Handler(base):  # type: ignore[misc]
        def _put_value(self, scope, key, value):
            super()._put_value(scope, key, value)
            if scope != _FIRST_SCOPE:
                return
            server = self.server
            come = server.cache.get(scope)
            # Another dictionary is another round's.
            while come and server.cache.get(scope) is come and complete():
                if len(come) >= server.scope_size.get(scope, 0):
                    return
                time.sleep(_POLL_S)

    return _Handler
