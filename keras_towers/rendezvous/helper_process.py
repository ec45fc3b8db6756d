"""A helper process beside each rank that joined a job without our launcher.

It sends the rank's heartbeat, since a rank's own threads stand still while one
of them holds Python's lock. Beside rank 0 it serves the job's store instead,
gives every rank its place when all have come, and says which ones are gone;
that it answers is rank 0's heartbeat.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_towers import settings
from keras_towers.rendezvous.hosts import place_ranks
from keras_towers.rendezvous.liveness import Liveness, State
from keras_towers.rendezvous.store import Endpoint
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


Helper = subprocess.Popen[bytes]

# Their input stays open as long as this process lives, and they with it.
_started: list[Helper] = []


def start_store(endpoint: Endpoint, size: int) -> tuple[Helper, Endpoint]:
    """Start the store of a job; OSError if it cannot listen there."""
    limits = settings.BEAT_S, settings.LOST_S
    helper = _start("serve", endpoint, size, *limits)
    assert helper.stdout is not None
    answer = helper.stdout.readline()
    if not answer:
        stop(helper)
        raise OSError(0, "the process that was to serve has ended")
    port, secret, *error = json.loads(answer)
    if error:
        stop(helper)
        raise OSError(*error)
    return helper, dataclasses.replace(endpoint, port=port, secret=secret)


def start_heartbeat(endpoint: Endpoint, rank: int) -> Helper:
    """Start to send the heartbeat of a rank to its job's store."""
    return _start("beat", endpoint, rank, settings.BEAT_S)


def stop(helper: Helper) -> None:
    """End a helper process."""
    assert helper.stdin is not None
    helper.stdin.close()
    helper.wait()


def _start(order: str, endpoint: Endpoint, *arguments: object) -> Helper:
    helper = subprocess.Popen(
        [sys.executable, "-c", _CALL, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Whoever interrupts the rank means the rank.
        start_new_session=True,
    )
    _started.append(helper)
    assert helper.stdin is not None
    line = json.dumps([order, dataclasses.astuple(endpoint), *arguments])
    helper.stdin.write(f"{line}\n".encode())
    helper.stdin.flush()
    return helper


def beat(
    over: threading.Event, endpoint: Sequence[Any], rank: int, beat_s: float
) -> None:
    """Send heartbeats until the rank ends, and say so then."""
    store, key = Endpoint(*endpoint).client(), f"{_HEARTBEAT}-{rank}"
    for number in itertools.count():
        has_ended = over.wait(beat_s if number else 0)
        with contextlib.suppress(OSError):
            store.put(key, State.ENDED if has_ended else number)
        if has_ended:
            return


def serve(
    over: threading.Event,
    endpoint: Sequence[Any],
    size: int,
    beat_s: float,
    lost_s: float,
) -> None:
    """Serve the store; give ranks their places when all have come, and watch.

    The answer is the store's port and secret, and what is wrong.
    """
    try:
        server = StoreServer(*endpoint)
    except OSError as error:
        answer = [0, "", error.errno, error.strerror]
        print(json.dumps(answer), flush=True)
        return
    found = server.endpoint
    print(json.dumps([found.port, found.secret]), flush=True)
    ranks, come = range(size), dict[int, Any]()
    while len(come) < size:
        if over.wait(settings.NETWORK_POLL_S):
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
        ranks[1:],
        lambda others: {r: server.get(f"{_HEARTBEAT}-{r}") for r in others},
        lost_s,
    )
    while not over.wait(beat_s):
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
    """Execute the order read from stdin, until that is closed."""
    order, *arguments = json.loads(sys.stdin.readline())
    over = threading.Event()

    def wait_for_end() -> None:
        # Unbuffered: a thread that blocks in sys.stdin cannot be ended at exit.
        os.read(0, 1)
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    orders: dict[str, Callable[..., None]] = {"serve": serve, "beat": beat}
    orders[order](over, *arguments)
