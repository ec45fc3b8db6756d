"""Naming the ranks that the others wait for.

Horovod 0.28.1's own stall inspector knows no ranks where it runs over Gloo
(``gloo_controller.cc`` reserves room for their list and leaves it empty), and
so never finds one missing. This one watches what Python sees: every rank leaves
word of how far it has come in the job's rendezvous server, and one that has
stood still for long reads what the others have left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from keras_towers import noticeboard, rendezvous
from keras_towers.errors import EXIT_AGAIN
from keras_towers.rendezvous import Board

logger: logging.Logger = logging.getLogger("keras_towers")

_WARNING_S = 30.0
_BEATS_A_WARNING = 6
_LONGEST_BEAT_S = 5.0

# What counts where Python does not see it, in the steps of a compiled loop:
# returns how many updates of the weights were begun, and how many ended. They
# stay: a number that sinks would make a rank look as if it were behind.
counters: list[Callable[[], tuple[int, int]]] = []


@dataclasses.dataclass
class Progress:
    """How far a rank has come.

    Attributes:
        position: how many collectives of Python it has begun.
        what: the last one of them, in words; empty outside of training.
        beat: grows as long as the rank is alive and not stopped.
    """

    position: int = 0
    what: str = ""
    beat: int = 0


class Store:
    """What the ranks leave on what the job's processes have in common."""

    def __init__(self, server: Board):
        self._server = server

    def put(self, rank: int, place: Progress) -> None:
        """Leave word."""
        data = json.dumps(dataclasses.asdict(place)).encode()
        with contextlib.suppress(OSError):
            self._server.put(f"stall-{rank}", data)

    def get(self, rank: int) -> Progress | None:
        """Read what a rank has left, None if nothing."""
        try:
            data = self._server.get(f"stall-{rank}")
        except OSError:
            return None
        return Progress(**json.loads(data)) if data else None


def waited_for(
    mine: Progress,
    before: dict[int, Progress | None],
    now: dict[int, Progress | None],
) -> dict[int, str]:
    """Find the ranks that this one waits for.

    Args:
        mine: how far this rank has come.
        before: what the ranks had left some beats ago; None: nothing.
        now: what they have left by now.

    Returns:
        The ranks and, for each, what keeps it.
    """
    found = {}
    for rank, place in now.items():
        past = before.get(rank)
        if place is None:
            found[rank] = "has given no sign of life"
        elif past is not None and past.beat == place.beat:
            found[rank] = "has stopped giving signs of life"
        elif place.position < mine.position:
            found[rank] = f"is still {_at(place)}"
        elif place.position == mine.position and place.what != mine.what:
            # As many steps, but others: each waits for the other one.
            found[rank] = f"is {_at(place)}"
    return found


def _at(place: Progress) -> str:
    return f"in {place.what}" if place.what else "outside of training"


class StallWatch(threading.Thread):
    """Warns when this rank waits for others, and ends it at last.

    Args:
        rank: this rank.
        size: number of ranks.
        store: where ranks leave word.
        warning_s: seconds of standing still until the others are looked at.
        shutdown_s: seconds until the process ends, and so the job; 0: never.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        warning_s: float = _WARNING_S,
        shutdown_s: float = 0,
    ):
        super().__init__(name="keras-towers-stall", daemon=True)
        self.place: tuple[int, int] = rank, size
        self._rank = rank
        self._others = [r for r in range(size) if r != rank]
        self._store = store
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._come = Progress()
        # The thread writes what it counts, others what they mark.
        self._marks = 0
        self._waits = self._updates_wait = False
        self._updates = self._first = _counted()
        self._since = time.monotonic()
        self._ended = threading.Event()

    def mark(self, what: str) -> None:
        """Note what this rank is about to do, or to wait in."""
        self._marks += 1
        self._come.what = what
        self._waits = bool(what)
        self._since = time.monotonic()

    def passed(self) -> None:
        """Note that it has been done."""
        self._waits = False

    def _count(self) -> None:
        """Find out how far this rank has come."""
        updates = begun, ended = _counted()
        done = begun - self._first[0]
        self._come.position = self._marks + done
        self._updates_wait = ended < begun
        if updates != self._updates:
            self._updates = updates
            if not self._waits:
                self._come.what = f"update {done}"
            self._since = time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def run(self) -> None:
        """Leave word at every beat; look at the others when standing still."""
        beat_s = min(self._warning_s / _BEATS_A_WARNING, _LONGEST_BEAT_S)
        warned = 0.0
        before: dict[int, Progress | None] = {}
        self._store.put(self._rank, self._come)
        while not self._ended.wait(beat_s):
            self._count()
            self._come.beat += 1
            self._store.put(self._rank, self._come)
            still_s = time.monotonic() - self._since
            waits = self._waits or self._updates_wait
            if not waits or still_s < self._warning_s - 2 * beat_s:
                before, warned = {}, 0.0
                continue
            if self._store.get(self._rank) is None:
                continue  # The server is gone; so will this process be.
            now = {rank: self._store.get(rank) for rank in self._others}
            # Two beats lie between them, so that a sign of life may be late.
            before = before or now
            if still_s < max(self._warning_s, warned + self._warning_s):
                continue
            found = waited_for(self._come, before, now)
            before, warned = {}, still_s
            if found:
                self._tell(found, still_s)

    def _tell(self, found: dict[int, str], still_s: float) -> None:
        names = "; ".join(f"rank {r} {why}" for r, why in found.items())
        text = (
            f"rank {self._rank} has waited for {still_s:.0f} s in "
            f"{self._come.what}: {names}."
        )
        if not self._shutdown_s or still_s < self._shutdown_s:
            logger.warning(text)
            return
        # The main thread waits in a collective, where no exception reaches it.
        print(f"keras_towers: {text} Ending the job.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_AGAIN)


def _counted() -> tuple[int, int]:
    counts = [count() for count in counters]
    return sum(n for n, _ in counts), sum(n for _, n in counts)


def from_environment(rank: int, size: int) -> StallWatch | None:
    """Start the watch of this process, as its launcher has set it.

    It obeys Horovod's ``HOROVOD_STALL_CHECK_TIME_SECONDS``,
    ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` and ``HOROVOD_STALL_CHECK_DISABLE``.

    Returns:
        The watch, or None without others, without a rendezvous server (as
        under MPI, where Horovod's own inspector works) or a noticeboard, or
        where disabled.
    """
    server: Board | None = rendezvous.from_environment()
    server = server or noticeboard.from_environment()
    disabled = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") != "0"
    if size == 1 or disabled or server is None:
        return None
    warning = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", _WARNING_S)
    shutdown = os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0)
    if os.environ.get("HOROVOD_ELASTIC"):
        shutdown = 0  # Others can go on, and the driver decides with whom.
    watch = StallWatch(
        rank, size, Store(server), float(warning), float(shutdown)
    )
    watch.start()
    return watch


# One per process, however many strategies there are.
_watch: StallWatch | None = None


def watch_over(rank: int, size: int) -> None:
    """Watch this process as a rank, instead of as what it was before."""
    global _watch
    if _watch is not None and _watch.place == (rank, size):
        return
    unwatch()
    _watch = from_environment(rank, size)


def unwatch() -> None:
    """Watch this process no longer."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = None


def mark(what: str) -> None:
    """Note what this rank is about to do, or to wait in, if it is watched."""
    if _watch is not None:
        _watch.mark(what)


def passed() -> None:
    """Note that it has been done."""
    if _watch is not None:
        _watch.passed()
