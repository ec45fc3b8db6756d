"""Signs of life of a job's ranks, and the ranks that this one waits for.

Horovod 0.28.1's own stall inspector (``gloo_controller.cc``) knows no ranks
over Gloo. Here every rank leaves word in the store of how far it has come, and
one that waits for long reads the words of those after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from keras_towers import settings
from keras_towers.errors import EXIT_AGAIN
from keras_towers.rendezvous import store as store_lib
from keras_towers.rendezvous.liveness import Liveness, Progress, waited_for
from keras_towers.rendezvous.store import StoreClient

logger: logging.Logger = logging.getLogger("keras_towers")

_BEATS_A_WARNING = 6
# So many beats after the last sign there is one no more, though one be late.
# A rank begins to look so many before it warns.
_SILENT_BEATS = 2.5
_LOOKING_BEATS = 3
_WORD = "stall"
# With the number of a call behind it: which rank failed first in it, and why.
_FAILED = "failed"
# The name of rank 0, where ranks met by themselves and a process beside each
# gives its signs of life; empty elsewhere. In the store the process beside rank
# 0 says who is gone, and how: by their ranks, names and reasons.
first: list[str] = []
LOST = "lost"
ENDED = "has ended"
SILENT = "is lost: it gives no sign of life"

# What counts where Python does not see it, in the steps of a compiled loop:
# returns how many updates of the weights were begun, and how many ended. They
# stay: a number that sinks would make a rank look as if it were behind.
counters: list[Callable[[], tuple[int, int]]] = []


class StallWatch(threading.Thread):
    """Warns when this rank waits for others, and ends it at last; 0: never."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: StoreClient,
        warning_s: float = settings.STALL_WARNING_S,
        shutdown_s: float = 0,
    ):
        super().__init__(name="keras-towers-stall", daemon=True)
        self.place: tuple[int, int] = rank, size
        self._rank = rank
        self.store: StoreClient = store
        # If each looked at all, what the store is asked would grow with N times
        # N. Who is missed is told by those before it.
        looked_at = range(1, min(size, settings.LOOKED_AT + 1))
        self._others = sorted((rank + after) % size for after in looked_at)
        # Of the others, from the first look at them on.
        self._signs: Liveness | None = None
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._come = Progress()
        # The thread writes what it counts, others what they mark.
        self._marks = 0
        self._waits = self._updates_wait = False
        self._updates = self._first = _counted()
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._heard = time.monotonic()
        self._told: set[str] = set()

    def mark(self, what: str) -> None:
        """Note what this rank is about to do, or to wait in."""
        self._marks += 1
        self._come.what = what
        self._waits = bool(what)
        self._since = time.monotonic()

    def passed(self) -> None:
        """Note that it has been done."""
        self._waits = False

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Note that it takes time before this rank waits in what it marked."""
        what, waits = self._come.what, self._waits
        if what:
            self._come.what = f"the preparation of {what}"
        self._waits = False
        try:
            yield
        finally:
            self._come.what, self._waits = what, waits
            self._since = time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def run(self) -> None:
        """Leave word at every beat; look at the others when standing still."""
        beat_s = min(self._warning_s / _BEATS_A_WARNING, settings.STALL_BEAT_S)
        warned = 0.0
        lost: dict[str, str] = {}
        self._leave_word()
        while not self._ended.wait(beat_s):
            self._count()
            self._come.beat += 1
            before, lost = lost, self._look_for_lost()
            still_s = time.monotonic() - self._since
            waits = self._waits or self._updates_wait
            # Who has ended may have sent what is still on its way.
            gone = {
                name: why
                for name, why in lost.items()
                if why == SILENT or name in before
            }
            if gone and waits:
                self._end(gone, still_s)
            self._leave_word()
            if not waits or still_s < self._warning_s - _LOOKING_BEATS * beat_s:
                warned = 0.0
                self._signs = None
                continue
            found = self._look(beat_s)
            if not found or still_s < warned + self._warning_s:
                continue
            warned = still_s
            if self._shutdown_s and still_s >= self._shutdown_s:
                self._end(found, still_s)
            else:
                logger.warning("%s", self._text(found, still_s))

    def _look_for_lost(self) -> dict[str, str]:
        """The names of the ranks that are gone, and how that is known."""
        if not first:
            return {}  # Their launcher watches them.
        try:
            lost = self.store.get(LOST) or {}
            self._heard = time.monotonic()
        except OSError as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ConnectionRefusedError):
                return {first[0]: ENDED}
            silent_s = time.monotonic() - self._heard
            return {first[0]: SILENT} if silent_s > settings.LOST_S else {}
        others = {
            name: why
            for rank, (name, why) in lost.items()
            if int(rank) != self._rank
        }
        for name in others.keys() - self._told:
            self._told.add(name)
            if others[name] == SILENT:
                logger.warning("%s %s.", name, SILENT)
        return others

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

    def _leave_word(self) -> None:
        if first and time.monotonic() - self._heard > settings.STALL_BEAT_S:
            return  # It would wait for an answer once more.
        with contextlib.suppress(OSError):
            word = dataclasses.asdict(self._come)
            self.store.put(f"{_WORD}-{self._rank}", word)

    def _look(self, beat_s: float) -> dict[str, str]:
        """The ranks that this one waits for, and why, as far as is known."""
        if self._signs is None:
            words = functools.partial(self.store.by_rank, _WORD)
            self._signs = Liveness(self._others, words)
        signs = self._signs
        try:
            signs.look()
        except OSError:  # The store is gone; so will this process be.
            return {}
        silent_s = _SILENT_BEATS * beat_s
        silent = [r for r in self._others if signs.silent_s(r) > silent_s]
        places = {
            r: word and Progress(**word) for r, word in signs.signs.items()
        }
        found = waited_for(self._come, places, silent)
        named = dict(itertools.islice(found.items(), settings.NAMED))
        told = {f"rank {rank}": why for rank, why in named.items()}
        if len(found) > len(named):
            told[f"{len(found) - len(named)} more"] = "likewise"
        return told

    def _text(self, found: Mapping[str, str], still_s: float) -> str:
        told = "; ".join(f"{name} {why}" for name, why in found.items())
        return (
            f"rank {self._rank} has waited for {still_s:.0f} s in "
            f"{self._come.what}: {told}."
        )

    def _end(self, found: Mapping[str, str], still_s: float) -> None:
        end(f"{self._text(found, still_s)} Ending the job.")


def end(text: str) -> None:
    """End this process, whose main thread waits where no exception arrives."""
    print(f"keras_towers: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_AGAIN)


def _counted() -> tuple[int, int]:
    counts = [count() for count in counters]
    return sum(n for n, _ in counts), sum(n for _, n in counts)


def from_environment(rank: int, size: int) -> StallWatch | None:
    """Start the watch of this process, None if nobody is to be watched."""
    # Without a store, as under MPI, Horovod's own inspector works.
    store = store_lib.from_environment()
    if size == 1 or store is None:
        return None
    warning_s = float(
        os.environ.get(settings.STALL_WARNING, settings.STALL_WARNING_S)
    )
    if os.environ.get(settings.STALL_DISABLE, "0") != "0":
        warning_s = math.inf
    shutdown = os.environ.get(settings.STALL_SHUTDOWN, 0)
    if os.environ.get("HOROVOD_ELASTIC"):
        shutdown = 0  # Others can go on, and the driver decides with whom.
    watch = StallWatch(rank, size, store, warning_s, float(shutdown))
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


def failed_before(call: int, why: str) -> str:
    """Say that a call fails here; return which rank failed before, and why."""
    # Of an elastic job the others go on.
    if _watch is None or os.environ.get("HOROVOD_ELASTIC"):
        return ""
    first = _watch.place[0], why
    with contextlib.suppress(OSError):
        first = _watch.store.first(f"{_FAILED}-{call}", first)
    rank, reason = first
    # What all ranks refuse is no rank's failure.
    if rank == _watch.place[0] or reason == why:
        return ""
    return f"rank {rank} failed first: {reason}"


def passed() -> None:
    """Note that it has been done."""
    if _watch is not None:
        _watch.passed()


def preparing() -> contextlib.AbstractContextManager[None]:
    """Note that a step is traced, which the other ranks have to wait for."""
    return contextlib.nullcontext() if _watch is None else _watch.preparing()
