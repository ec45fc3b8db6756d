"""Watches which ranks this rank waits for, and which of them are gone.

Horovod 0.28.1's own stall inspector (``gloo_controller.cc``) knows no ranks
over Gloo. Here every rank reports its progress to the server of the job's
store, whose answer says which ranks are late or gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from keras_towers import settings
from keras_towers.errors import EXIT_AGAIN
from keras_towers.rendezvous import store as store_lib
from keras_towers.rendezvous.liveness import ANSWERED, Liveness, State
from keras_towers.rendezvous.rank_environment import is_elastic
from keras_towers.rendezvous.store import Progress, StoreClient

logger: logging.Logger = logging.getLogger("keras_towers")

_BEATS_A_WARNING = 6
# A rank that is silent for so many has stopped; a single beat may be late.
_SILENT_BEATS = 2.5
# With the number of a call behind it: which rank failed first in it, and why.
_FAILED = "failed"
rank0_name: str = ""
"""The name of rank 0 in a job that our launcher did not start; else empty.

In such a job the heartbeat process of each rank sends its signs of life, and
the one beside rank 0 serves the store, and knows which ranks are gone.
"""

counters: list[Callable[[], tuple[int, int]]] = []
"""Functions that return how many weight updates have begun and have ended.

They count the steps of a compiled loop, which Python does not see. They stay: a
number that sinks would make a rank look as if it were behind.
"""


class Record:
    """What this rank does, or waits for; methods are called by any thread.

    Attributes:
        marks: how many actions were marked.
        what: the last of them; empty outside of training.
        waits: whether other ranks may be the reason that it takes long.
        since: when it began, by ``time.monotonic``.
    """

    def __init__(self):
        self.marks = 0
        self.what = ""
        self.waits = False
        self.since: float = time.monotonic()

    def mark(self, what: str) -> None:
        """Record what this rank is about to do, or to wait for."""
        self.marks += 1
        self.what, self.waits = what, bool(what)
        self.since = time.monotonic()

    def passed(self) -> None:
        """Record that the action marked last is done."""
        self.waits = False

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Record that this rank traces a step, which makes others wait."""
        what, waits = self.what, self.waits
        if what:
            self.what = f"the preparation of {what}"
        self.waits = False
        try:
            yield
        finally:
            self.what, self.waits = what, waits
            self.since = time.monotonic()


_record = Record()
mark = _record.mark
passed = _record.passed
preparing = _record.preparing


class StallWatch(threading.Thread):
    """Warns when this rank waits too long, and finally ends it; 0: never."""

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
        self.store: StoreClient = store
        self._rank = rank
        self._rank0 = Liveness([0], self._report, settings.LOST_S)
        self._late: dict[str, str] = {}
        self._gone: dict[str, State] = {}
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._first_mark = _record.marks
        self._updates = self._first_updates = _count_updates()
        self._beat_s: float = min(
            warning_s / _BEATS_A_WARNING, settings.STALL_BEAT_S
        )
        self._progress = Progress(size, _SILENT_BEATS * self._beat_s)
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()

    def run(self) -> None:
        """Report progress at every beat; warn, or end, while waiting."""
        warned = 0.0
        gone: dict[str, State] = {}
        self._advance()
        self._rank0.refresh()
        while not self._ended.wait(self._beat_s):
            waits = self._advance()
            self._rank0.refresh()
            before, gone = gone, self._gone_ranks()
            still_s = time.monotonic() - _record.since
            # What a rank sent before it ended may still be on its way.
            missing = {
                name: state
                for name, state in gone.items()
                if state == State.LOST or name in before
            }
            if missing and waits:
                self._end(missing, still_s)
            if not waits or still_s < self._warning_s:
                warned = 0.0
            elif self._late and still_s >= warned + self._warning_s:
                warned = still_s
                if self._shutdown_s and still_s >= self._shutdown_s:
                    self._end(self._late, still_s)
                else:
                    logger.warning("%s", self._text(self._late, still_s))

    def _advance(self) -> bool:
        """Update this rank's progress; return whether it waits for others."""
        record = _record
        begun, ended = updates = _count_updates()
        done = begun - self._first_updates[0]
        if updates != self._updates:
            self._updates = updates
            record.since = time.monotonic()
            if not record.waits:
                record.what = f"update {done}"
        self._progress.position = record.marks - self._first_mark + done
        self._progress.what = record.what
        return record.waits or ended < begun

    def _gone_ranks(self) -> dict[str, State]:
        """Return the other ranks that are gone, with their states."""
        state = self._rank0.state(0)
        if rank0_name and state.is_gone:
            return {rank0_name: state}
        return self._gone  # Empty where a launcher watches the ranks.

    def _report(self, _: Sequence[int]) -> dict[int, Any]:
        """Report to the store; its answer is rank 0's sign of life."""
        self._late, self._gone = {}, {}
        try:
            answer = self.store.report(self._rank, self._progress)
        except OSError as error:
            reason = getattr(error, "reason", error)
            has_ended = isinstance(reason, ConnectionRefusedError)
            return {0: State.ENDED} if has_ended else {}
        self._late = answer["late"]
        self._gone = {n: State(state) for n, state in answer["gone"].items()}
        return {0: ANSWERED}

    def _text(self, found: Mapping[str, str], still_s: float) -> str:
        reasons = "; ".join(f"{name} {why}" for name, why in found.items())
        return (
            f"rank {self._rank} has waited for {still_s:.0f} s in "
            f"{self._progress.what}: {reasons}."
        )

    def _end(self, found: Mapping[str, str], still_s: float) -> None:
        end(f"{self._text(found, still_s)} Ending the job.")


def end(text: str) -> None:
    """End this process, whose main thread cannot receive an exception."""
    print(f"keras_towers: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_AGAIN)


def _count_updates() -> tuple[int, int]:
    counts = [count() for count in counters]
    return sum(n for n, _ in counts), sum(n for _, n in counts)


# One per process, however many strategies there are.
_watch: StallWatch | None = None


def watch_over(rank: int, size: int) -> None:
    """Watch this process under a new rank, unless watching is off."""
    global _watch
    if _watch is not None and _watch.place == (rank, size):
        return
    unwatch()
    # Without a store, as under MPI, Horovod's own inspector works.
    store = store_lib.from_environment()
    if size == 1 or store is None:
        return
    warning_s = float(
        os.environ.get(settings.STALL_WARNING, settings.STALL_WARNING_S)
    )
    if os.environ.get(settings.STALL_DISABLE, "0") != "0":
        warning_s = math.inf
    shutdown_s = float(os.environ.get(settings.STALL_SHUTDOWN, 0))
    if is_elastic():
        shutdown_s = 0  # Others can go on, and the driver decides with whom.
    mark("")
    _watch = StallWatch(rank, size, store, warning_s, shutdown_s)
    _watch.start()


def unwatch() -> None:
    """Stop watching this process."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = None


def failed_before(call: int, why: str) -> str:
    """Report a failed call; return which rank failed before, and why."""
    # Of an elastic job the others go on.
    if _watch is None or is_elastic():
        return ""
    first = _watch.place[0], why
    with contextlib.suppress(OSError):
        first = _watch.store.first(f"{_FAILED}-{call}", first)
    rank, reason = first
    # What all ranks refuse is no rank's failure.
    if rank == _watch.place[0] or reason == why:
        return ""
    return f"rank {rank} failed first: {reason}"
