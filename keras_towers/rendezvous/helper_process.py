"""A helper process beside each rank that joined a job without our launcher.

It sends the rank's heartbeat, since a rank's own threads stand still while one
of them holds Python's lock. Beside rank 0 it serves the job's store, too, gives
every rank its place when all have come, and says which ones are gone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_towers import settings
from keras_towers.rendezvous.hosts import place_ranks
from keras_towers.rendezvous.liveness import Liveness, State
from keras_towers.rendezvous.store import Endpoint, StoreClient
from keras_towers.rendezvous.store_server import StoreServer

INTRODUCTION = "introduction"
"""With a rank behind it, the key of what the rank tells of itself."""
PLACE = "place"
"""With a rank behind it, the key of what the rank is told."""
MISSING = "missing"
"""The key of the ranks that have not introduced themselves."""
_HEARTBEAT = "heartbeat"
# As this process finds the package.
_CALL = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keras_towers.rendezvous import helper_process; helper_process.main()"
)


class HelperProcess:
    """The helper process, as seen by its rank."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CALL, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Whoever interrupts the rank means the rank.
            start_new_session=True,
        )

    def serve(self, endpoint: Endpoint, size: int) -> Endpoint:
        """Serve the store of a job; OSError if it cannot listen there."""
        limits = settings.BEAT_S, settings.LOST_S
        self._send("serve", dataclasses.astuple(endpoint), size, *limits)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise OSError(0, "the process that was to serve has ended")
        port, secret, *error = json.loads(answer)
        if error:
            raise OSError(*error)
        return dataclasses.replace(endpoint, port=port, secret=secret)

    def beat(self, endpoint: Endpoint, rank: int) -> None:
        """Send the heartbeat of a rank to its job's store."""
        self._send("beat", dataclasses.astuple(endpoint), rank, settings.BEAT_S)

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, *order: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()


class Helper:
    """What the helper process does; its public methods are the orders."""

    def __init__(self):
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    def serve(
        self, endpoint: Sequence[Any], size: int, beat_s: float, lost_s: float
    ) -> list[Any]:
        """Serve the store; return its port and secret, or an error."""
        try:
            server = StoreServer(*endpoint)
        except OSError as error:
            return [0, "", error.errno, error.strerror]
        self._start(self._attend, server, size, beat_s, lost_s)
        return [server.endpoint.port, server.endpoint.secret]

    def beat(self, endpoint: Sequence[Any], rank: int, beat_s: float) -> None:
        """Send heartbeats until the rank ends."""
        client, key = Endpoint(*endpoint).client(), f"{_HEARTBEAT}-{rank}"
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

    def _attend(
        self, server: StoreServer, size: int, beat_s: float, lost_s: float
    ) -> None:
        """Give ranks their places when all have come, and watch them."""
        ranks, come = range(size), dict[int, Any]()
        while len(come) < size:
            if self._over.wait(settings.NETWORK_POLL_S):
                return
            # All of them each time: one may have ended and been started again.
            said = {r: server.get(f"{INTRODUCTION}-{r}") for r in ranks}
            come = {rank: one for rank, one in said.items() if one}
            server.put(MISSING, [rank for rank in ranks if rank not in come])
        everyone = [come[rank] for rank in ranks]
        server.begin(place_ranks([one["host"] for one in everyone]))
        for rank, place in enumerate(_places(everyone)):
            server.put(f"{PLACE}-{rank}", place)
        liveness = Liveness(
            ranks,
            lambda all_: {r: server.get(f"{_HEARTBEAT}-{r}") for r in all_},
            lost_s,
        )
        while not self._over.wait(beat_s):
            liveness.refresh()
            # All ranks are told, however many are gone.
            gone = itertools.islice(liveness.gone().items(), settings.NAMED)
            server.gone = {r: (_name(r, come[r]), state) for r, state in gone}


def _places(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each rank is told, whose size does not grow with the job."""
    hosts = [one["host"] for one in everyone]
    # A launcher may have given each rank cores of its own.
    cores = [(one["host"], *one["cores"]) for one in everyone]
    sharing = collections.Counter(cores)
    elsewhere = [one["address"] for one in everyone if one["host"] != hosts[0]]
    return [
        {
            "nonce": one["nonce"],
            "slot": dataclasses.asdict(slot),
            "sharing": sharing[own_cores],
            "rank0_name": _name(0, everyone[0]),
            "elsewhere": elsewhere[0] if elsewhere else None,
        }
        for one, slot, own_cores in zip(
            everyone, place_ranks(hosts), cores, strict=True
        )
    ]


def _name(rank: int, introduction: Mapping[str, Any]) -> str:
    return f"rank {rank} on {introduction['name']}"


def main() -> None:
    """Execute the orders read from stdin, until it is closed."""
    helper = Helper()
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answer = getattr(helper, order)(*arguments)
        if answer is not None:
            print(json.dumps(answer), flush=True)
    helper.end()
