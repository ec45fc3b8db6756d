"""A helper process beside each rank that joined a job without our launcher.

It sends the rank's heartbeat, since a rank's own threads stand still while one
of them holds Python's lock. Beside rank 0 it serves the job's store, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers import settings
from keras_towers.rendezvous.hosts import place_ranks
from keras_towers.rendezvous.liveness import Liveness, State
from keras_towers.rendezvous.store import Endpoint, StoreClient
from keras_towers.rendezvous.store_server import StoreServer
from keras_towers.rendezvous.watch import GONE

# As this process finds the package.
_CALL = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keras_towers.rendezvous import heartbeat; heartbeat.main()"
)
_KEY = "heartbeat"


class HeartbeatProcess:
    """The heartbeat process, as seen by its rank."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CALL, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Whoever interrupts the rank means the rank.
            start_new_session=True,
        )

    def serve(self, endpoint: Endpoint) -> Endpoint:
        """Serve the job's store; OSError if it cannot listen there."""
        port, secret, *error = self._ask("serve", dataclasses.astuple(endpoint))
        if error:
            raise OSError(*error)
        return dataclasses.replace(endpoint, port=port, secret=secret)

    def by_rank(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The values that ranks have stored at ``key-rank``."""
        return dict(self._ask("by_rank", key, [*ranks]))

    def publish(self, key: str, values: Sequence[Any]) -> None:
        """Store a value for each rank, at ``key-rank``."""
        self._ask("publish", key, values)

    def begin(self, hosts: Sequence[str], names: Sequence[str]) -> None:
        """Begin a job, given the names and hosts of its ranks."""
        self._ask("begin", hosts, names, settings.BEAT_S, settings.LOST_S)

    def beat(self, endpoint: Endpoint, rank: int) -> None:
        """Send the heartbeat of a rank to its job's store."""
        self._send("beat", dataclasses.astuple(endpoint), rank, settings.BEAT_S)

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, *order: object) -> Any:
        self._send(*order)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise OSError(0, "the process that was to serve has ended")
        return json.loads(answer)

    def _send(self, *order: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()


class _HeartbeatServer:
    """The heartbeat process; its public methods are the commands of a rank."""

    def __init__(self):
        self._server: StoreServer | None = None
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    def serve(self, endpoint: Sequence[Any]) -> list[Any]:
        try:
            self._server = StoreServer(*endpoint)
        except OSError as error:
            return [0, "", error.errno, error.strerror]
        return [self._server.endpoint.port, self._server.secret]

    def by_rank(self, key: str, ranks: Sequence[int]) -> list[Any]:
        assert self._server is not None
        return [*self._server.by_rank(key, ranks).items()]

    def publish(self, key: str, values: Sequence[Any]) -> bool:
        assert self._server is not None
        for rank, value in enumerate(values):
            self._server.put(f"{key}-{rank}", value)
        return True

    def begin(
        self,
        hosts: Sequence[str],
        names: Sequence[str],
        beat_s: float,
        lost_s: float,
    ) -> bool:
        assert self._server is not None
        self._server.begin(place_ranks(hosts))
        self._start(self._watch, self._server, names, beat_s, lost_s)
        return True

    def beat(self, endpoint: Sequence[Any], rank: int, beat_s: float) -> None:
        client, key = Endpoint(*endpoint).client(), f"{_KEY}-{rank}"
        self._beating = self._start(self._beat, client, key, beat_s)

    def end(self) -> None:
        """Report that the rank has ended."""
        self._over.set()
        if self._beating is not None:
            self._beating.join()

    def _start(
        self, work: Callable[..., None], *arguments: Any
    ) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    def _beat(self, store: StoreClient, key: str, beat_s: float) -> None:
        for beat in itertools.count():
            over = self._over.wait(beat_s if beat else 0)
            with contextlib.suppress(OSError):
                store.put(key, State.ENDED if over else beat)
            if over:
                return

    def _watch(
        self,
        server: StoreServer,
        names: Sequence[str],
        beat_s: float,
        lost_s: float,
    ) -> None:
        heartbeats = functools.partial(server.by_rank, _KEY)
        liveness = Liveness(range(len(names)), heartbeats, lost_s)
        while not self._over.wait(beat_s):
            liveness.refresh()
            gone = liveness.gone().items()
            # All ranks read it, however many are gone.
            some = itertools.islice(gone, settings.NAMED)
            server.put(GONE, {rank: (names[rank], why) for rank, why in some})


def main() -> None:
    """Execute the commands read from stdin, until it is closed."""
    server = _HeartbeatServer()
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answer = getattr(server, order)(*arguments)
        if answer is not None:
            print(json.dumps(answer), flush=True)
    server.end()
