"""The helper process of a rank that another launcher has started.

The helper of rank 0 serves the store of the job, assigns each rank its
placement when all have arrived, and reports ranks that are gone; its answers
are the heartbeat of rank 0. The helper of any other rank sends the rank's
heartbeat, because threads of the rank itself do not run while one of them holds
Python's global lock.
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from keras_towers.foundation import settings
from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.system import allow_open_files
from keras_towers.jobs import agent
from keras_towers.jobs.rendezvous.hosts import place_ranks
from keras_towers.jobs.rendezvous.liveness import (
    ANSWERED,
    Liveness,
    TaskState,
)
from keras_towers.jobs.rendezvous.store import HEARTBEAT, Endpoint, StoreClient
from keras_towers.jobs.rendezvous.store_server import StoreServer

INTRODUCTIONS = "introductions"
"""The key of what all ranks say of themselves."""
PLACEMENT = "placement"
"""Followed by a rank, the key of the rank's placement in the job."""
# With this process's path, so that both find the same package; set when Python
# has started, so that nothing beside the user's script is imported before.
_HELPER_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keras_towers.jobs.rendezvous import rank_helper; "
    "rank_helper.help_rank()"
)
# The open files of the store's process, besides connections.
_OTHER_FILES = 100

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
        stop_helper(helper)
        raise OSError(0, "the process that serves the store has ended")
    port, secret, *error = json.loads(answer)
    if error:
        stop_helper(helper)
        raise OSError(*error)
    return helper, dataclasses.replace(endpoint, port=port, secret=secret)


def start_heartbeat(endpoint: Endpoint, rank: int, size: int) -> Helper:
    """Start sending the heartbeat of a rank to its job's store."""
    return _start("beat", endpoint, rank, heartbeat_pause_s(size))


def heartbeat_pause_s(size: int) -> float:
    """Return the pause between two heartbeats of each of so many ranks.

    It is a fraction of the limit for silence, so that a single late or lost
    heartbeat does not matter.
    """
    pause_s = max(settings.HEARTBEAT_S, size / settings.HEARTBEATS_PER_S)
    return min(pause_s, settings.LOST_S / 4)


def stop_helper(helper: Helper) -> None:
    """End a helper process."""
    assert helper.stdin is not None
    helper.stdin.close()
    helper.wait()


def _start(task: str, endpoint: Endpoint, *arguments: object) -> Helper:
    helper = subprocess.Popen(
        [sys.executable, "-c", _HELPER_PROGRAM, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is meant for the rank, and must not end its helper first.
        start_new_session=True,
    )
    _started.append(helper)
    place = dataclasses.astuple(endpoint)
    line = json.dumps([os.getpid(), task, place, *arguments])
    assert helper.stdin is not None
    helper.stdin.write(f"{line}\n".encode())
    helper.stdin.flush()
    return helper


def beat(
    ended: threading.Event, endpoint: Sequence[Any], rank: int, beat_s: float
) -> None:
    """Send heartbeats until the rank ends, then report that it has ended."""
    client = StoreClient(Endpoint(*endpoint))
    key = f"{HEARTBEAT}{rank}"
    stop = agent.StopDetector(os.getppid())
    for number in itertools.count():
        has_ended = ended.wait(beat_s if number else 0)
        if not has_ended and stop.is_stopped():
            continue
        with contextlib.suppress(OSError):
            client.put(key, TaskState.ENDED if has_ended else number)
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
    too_few = allow_open_files(2 * size + _OTHER_FILES, f"{size} ranks")
    if too_few:
        print(f"keras_towers: {too_few}.", file=sys.stderr, flush=True)
    try:
        server = StoreServer(*endpoint)
    except OSError as error:
        answer = [0, "", error.errno, error.strerror]
        print(json.dumps(answer), flush=True)
        return
    bound = server.endpoint
    print(json.dumps([bound.port, bound.secret]), flush=True)
    introductions: list[JsonObject] | None = None
    while introductions is None:
        if ended.is_set():
            return
        introductions = server.get(INTRODUCTIONS, settings.NETWORK_POLL_S)
    server.begin_round(place_ranks([rank["host"] for rank in introductions]))
    stop, beats = agent.StopDetector(os.getppid()), 0

    def last_signs(ranks: Sequence[int]) -> dict[int, Hashable]:
        signs = {rank: server.get(f"{HEARTBEAT}{rank}") for rank in ranks}
        # The heartbeats of rank 0 are the answers of this process.
        return signs if stop.is_stopped() else {**signs, 0: ANSWERED}

    # Counted in beats: this process may have been stopped, too.
    liveness = Liveness(
        range(size), last_signs, lost_s / beat_s, clock=lambda: beats
    )
    for rank, placement in enumerate(_placements(introductions)):
        server.put(f"{PLACEMENT}-{rank}", placement)
    while not ended.wait(beat_s):
        beats += 1
        liveness.refresh()
        server.gone = {
            rank: (_name(rank, introductions[rank]), state)
            for rank, state in liveness.gone().items()
        }


def _placements(ranks: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the placement of each rank, in a size independent of the job's.

    Args:
        ranks: the introduction of each rank.
    """
    hosts = [rank["host"] for rank in ranks]
    # A launcher may have bound each rank to different cores.
    cores = [(rank["host"], *rank["cores"]) for rank in ranks]
    sharing = collections.Counter(cores)
    remote = [rank["address"] for rank in ranks if rank["host"] != hosts[0]]
    return [
        {
            "nonce": rank["nonce"],
            "slot": dataclasses.asdict(slot),
            "sharing": sharing[rank_cores],
            "rank0_name": _name(0, ranks[0]),
            "remote_address": remote[0] if remote else None,
        }
        for rank, slot, rank_cores in zip(
            ranks, place_ranks(hosts), cores, strict=True
        )
    ]


def _name(rank: int, introduction: Mapping[str, object]) -> str:
    return f"rank {rank} on {introduction['name']}"


def help_rank() -> None:
    """Do a task read from stdin, until stdin is closed or the rank ends."""
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
