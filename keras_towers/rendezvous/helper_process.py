"""A helper process beside each rank of a job that another launcher started.

It sends the rank's heartbeat, because threads of the rank itself do not run
while one of them holds Python's global lock. Beside rank 0 it serves the job's
store instead: it assigns each rank its placement when all have arrived, and
reports ranks that are gone. Its answers are the heartbeat of rank 0.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import select
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
"""Followed by a rank, the key under which the rank introduces itself."""
PLACEMENT = "placement"
"""Followed by a rank, the key of the rank's placement in the job."""
MISSING = "missing"
"""The key of the ranks that have not introduced themselves."""
_HEARTBEAT = "heartbeat"
# With this process's path, so that both find the same package.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keras_towers.rendezvous import helper_process; helper_process.main()"
)


Helper = subprocess.Popen[bytes]

# Kept so that the pipes to their stdin stay open: a helper ends when its stdin
# closes, or when this process ends, as a child of it may hold the pipe open.
_started: list[Helper] = []


def start_store(endpoint: Endpoint, size: int) -> tuple[Helper, Endpoint]:
    """Start the store of a job; OSError if it cannot listen there."""
    limits = settings.BEAT_S, settings.LOST_S
    helper = _start("serve", endpoint, size, *limits)
    assert helper.stdout is not None
    answer = helper.stdout.readline()
    if not answer:
        stop(helper)
        raise OSError(0, "the process that serves the store has ended")
    port, secret, *error = json.loads(answer)
    if error:
        stop(helper)
        raise OSError(*error)
    return helper, dataclasses.replace(endpoint, port=port, secret=secret)


def start_heartbeat(endpoint: Endpoint, rank: int) -> Helper:
    """Start sending the heartbeat of a rank to its job's store."""
    return _start("beat", endpoint, rank, settings.BEAT_S)


def stop(helper: Helper) -> None:
    """End a helper process."""
    assert helper.stdin is not None
    helper.stdin.close()
    helper.wait()


def _start(task: str, endpoint: Endpoint, *arguments: object) -> Helper:
    helper = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is meant for the rank, and must not end its helper first.
        start_new_session=True,
    )
    _started.append(helper)
    assert helper.stdin is not None
    line = json.dumps(
        [os.getpid(), task, dataclasses.astuple(endpoint), *arguments]
    )
    helper.stdin.write(f"{line}\n".encode())
    helper.stdin.flush()
    return helper


def beat(
    ended: threading.Event, endpoint: Sequence[Any], rank: int, beat_s: float
) -> None:
    """Send heartbeats until the rank ends, then report that it has ended."""
    store, key = StoreClient(Endpoint(*endpoint)), f"{_HEARTBEAT}-{rank}"
    for number in itertools.count():
        has_ended = ended.wait(beat_s if number else 0)
        with contextlib.suppress(OSError):
            store.put(key, State.ENDED if has_ended else number)
        if has_ended:
            return


def serve(
    ended: threading.Event,
    endpoint: Sequence[Any],
    size: int,
    beat_s: float,
    lost_s: float,
) -> None:
    """Serve the store: place the ranks when all have arrived, and watch them.

    Prints the store's port and secret, followed by the number and text of the
    error if it cannot listen.
    """
    try:
        server = StoreServer(*endpoint)
    except OSError as error:
        answer = [0, "", error.errno, error.strerror]
        print(json.dumps(answer), flush=True)
        return
    bound = server.endpoint
    print(json.dumps([bound.port, bound.secret]), flush=True)
    ranks, arrived = range(size), dict[int, Any]()
    while len(arrived) < size:
        if ended.wait(settings.NETWORK_POLL_S):
            return
        # All are read each time: a rank may have ended and been restarted.
        introductions = {r: server.get(f"{INTRODUCTION}-{r}") for r in ranks}
        arrived = {rank: one for rank, one in introductions.items() if one}
        server.put(MISSING, [rank for rank in ranks if rank not in arrived])
    in_order = [arrived[rank] for rank in ranks]
    server.begin_round(place_ranks([one["host"] for one in in_order]))
    for rank, placement in enumerate(_placements(in_order)):
        server.put(f"{PLACEMENT}-{rank}", placement)
    liveness = Liveness(
        ranks[1:],
        lambda watched: {r: server.get(f"{_HEARTBEAT}-{r}") for r in watched},
        lost_s,
    )
    while not ended.wait(beat_s):
        liveness.refresh()
        # Every rank gets this list, however many are gone: keep it short.
        gone = itertools.islice(
            liveness.gone().items(), settings.MAX_RANKS_NAMED
        )
        server.gone = {r: (_name(r, arrived[r]), state) for r, state in gone}


def _placements(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The placement of each rank; its size does not grow with the job.

    Args:
        ranks: the introduction of each rank.
    """
    hosts = [one["host"] for one in ranks]
    # A launcher may have bound each rank to different cores.
    cores = [(one["host"], *one["cores"]) for one in ranks]
    sharing = collections.Counter(cores)
    remote = [one["address"] for one in ranks if one["host"] != hosts[0]]
    return [
        {
            "nonce": one["nonce"],
            "slot": dataclasses.asdict(slot),
            "sharing": sharing[rank_cores],
            "rank0_name": _name(0, ranks[0]),
            "remote_address": remote[0] if remote else None,
        }
        for one, slot, rank_cores in zip(
            ranks, place_ranks(hosts), cores, strict=True
        )
    ]


def _name(rank: int, introduction: Mapping[str, Any]) -> str:
    return f"rank {rank} on {introduction['name']}"


def main() -> None:
    """Do the task read from stdin, until stdin is closed or the rank ends."""
    parent, task, *arguments = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_end() -> None:
        # A process whose parent has ended gets another one.
        while os.getppid() == parent:
            # Not sys.stdin: a thread blocked in it would hang at exit.
            closed, _, _ = select.select([0], [], [], settings.BEAT_S)
            if closed:
                break
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    tasks: dict[str, Callable[..., None]] = {"serve": serve, "beat": beat}
    tasks[task](ended, *arguments)
