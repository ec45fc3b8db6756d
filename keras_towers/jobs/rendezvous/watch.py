"""Threads that watch for ranks that are late or gone.

``Liveness`` decides who is gone; ``StallWatch`` asks the store, and
``AnswerWatch`` polls processes.

Every rank reports to the server of the job's store how many exchanges it has
begun, and which of them have not ended. The server sees all ranks: it answers
which of them are late or gone, whether all wait and none moves, and whether two
ranks wait for each other, since they are in different exchanges. No engine
knows that: the stall inspector of Horovod 0.28.1 (``gloo_controller.cc``) does
not even know over Gloo which ranks are late.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from keras_towers.foundation import errors, settings, system
from keras_towers.foundation.errors import EXIT_AGAIN, TowerError, shorten
from keras_towers.foundation.message_lists import describe_each
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import (
    activity,
    rank_checks,
    store as store_lib,
)
from keras_towers.jobs.rendezvous.activity import this_rank
from keras_towers.jobs.rendezvous.liveness import (
    ANSWERED,
    Liveness,
    TaskState,
    ask_each,
    wait_loop,
)
from keras_towers.jobs.rendezvous.rank_environment import seconds
from keras_towers.jobs.rendezvous.store import Progress, StoreClient

T = TypeVar("T")

_BEATS_PER_WARNING = 6
# A rank that is silent for this many beats has stopped. One beat may be late.
_SILENT_BEATS = 2.5
# A rank that nothing interrupts ends when it has heard so often that it waits
# in vain: before that, another one fails, and with it the call of all.
_BEATS_TO_FAIL = 4
# The words for an exchange outside of a call.
_UNMARKED = "an exchange"


def wait_for_ranks(collective: Callable[[], T]) -> T:
    """Run a collective that some ranks may never come to; return its result.

    Nothing interrupts an engine that waits: so another thread runs it.

    Raises:
        TowerError: the ranks are in different exchanges.
        Exception: that of ``activity.refusing_by``: other ranks have ended, or
            do not come within the limit.
    """
    try:
        running = system.InThread(collective, "keras-towers-wait")
    except RuntimeError:
        # At the end of Python no thread can start.
        return collective()
    this_rank.running.append(running)
    this_rank.thread = running.thread
    try:
        return running.result()
    finally:
        this_rank.running.remove(running)


def _end_wait(error: Exception) -> bool:
    """Make ``wait_for_ranks`` raise an error; return if this rank is in it."""
    running = [*this_rank.running]
    for each in running:
        each.end_wait(error)
    return bool(running)


def join_wait() -> bool:
    """Wait a little for an abandoned wait; return whether it ends."""
    if this_rank.thread is not None:
        this_rank.thread.join(settings.CANCEL_S)
    return this_rank.thread is None or not this_rank.thread.is_alive()


class StallWatch(threading.Thread):
    """Warns if this rank waits too long, and finally ends it.

    Args:
        rank: this rank.
        size: the number of ranks.
        store: the job's store.
        warning_s: seconds of waiting between two warnings; ``inf``: never.
        shutdown_s: seconds of waiting until the process is ended; 0: never.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: StoreClient,
        warning_s: float = settings.STALL_WARNING_S,
        shutdown_s: float = 0,
    ):
        super().__init__(name="keras-towers-stall", daemon=True)
        self.rank, self.size = rank, size
        self.store: StoreClient = store
        self._rank0 = Liveness([0], self._report, settings.LOST_S)
        self._awaited: dict[str, str] = {}
        self._apart: dict[str, str] = {}
        self._gone: dict[str, TaskState] = {}
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        this_rank.begin_round(0)
        self._updates = self._first_updates = _number_of_updates(
            this_rank.exchanges.read()[0]
        )
        self._reading = threading.Lock()
        self._beat_s: float = min(
            warning_s / _BEATS_PER_WARNING, settings.STALL_BEAT_S
        )
        self._progress = Progress(size, _SILENT_BEATS * self._beat_s)
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread, which no longer asks TensorFlow for counts."""
        self._ended.set()
        with self._reading:
            return

    def run(self) -> None:
        """Report progress at every beat; warn, or end, while waiting."""
        warned, beats_apart = 0.0, 0
        gone: dict[str, TaskState] = {}
        self._advance()
        self.refresh()
        while not self._ended.wait(self._beat_s):
            waits = self._advance()
            self.refresh()
            before, gone = gone, self.gone
            waited_s = time.monotonic() - this_rank.since
            # Data that a rank sent before it ended may still arrive.
            is_late = waited_s >= min(self._warning_s, settings.STALL_WARNING_S)
            missing = {
                name: state
                for name, state in gone.items()
                if state == TaskState.LOST or (name in before and is_late)
            }
            if missing and waits:
                self._end(missing, waited_s)
            if not waits or waited_s < warned:  # Another wait has begun.
                warned = 0.0
            # Another thread may refresh, too.
            apart, awaited = self._apart, self._awaited
            is_apart = waits and apart and this_rank.in_order
            beats_apart = beats_apart + 1 if is_apart else 0
            if is_apart:
                self._fail(apart, beats_apart)
            if not waits or not awaited:
                continue
            if self._shutdown_s and waited_s >= self._shutdown_s:
                self._end(awaited, waited_s)
            if waited_s >= warned + self._warning_s:
                warned = waited_s
                logger.warning("%s", self._text(awaited, waited_s))

    def _advance(self) -> bool:
        """Update this rank's progress; return whether it waits for another."""
        with self._reading:
            if self._ended.is_set():
                return False
            exchanged, in_python, in_graphs = this_rank.exchanges.read()
        updates = _number_of_updates(exchanged)
        if updates != self._updates:
            self._updates = updates
            if not this_rank.waits:
                this_rank.action = f"update {updates - self._first_updates}"
        exchanged -= this_rank.exchanged
        position = [
            this_rank.round,
            this_rank.marks - this_rank.marked,
            exchanged.total(),
        ]
        progress = self._progress
        if position != progress.position:
            progress.position = position
            this_rank.since = time.monotonic()
        in_exchange = bool(in_python or (this_rank.action and in_graphs))
        pauses = this_rank.is_counted and not in_exchange
        waits = (this_rank.waits and not pauses) or bool(in_python)
        updating = any(name.startswith(activity.UPDATE) for name in in_graphs)
        progress.waits = waits = waits or updating
        progress.action = this_rank.action or (_UNMARKED if waits else "")
        progress.is_over = this_rank.is_over
        progress.does = this_rank.does if in_python else ""
        progress.in_python = bool(in_python)
        is_in_order = waits and this_rank.in_order
        progress.exchanges = in_python + in_graphs if is_in_order else []
        progress.begun = dict(exchanged) if is_in_order else {}
        return waits

    def refresh(self) -> None:
        """Report to the store, and ask it which ranks are late or gone."""
        self._rank0.refresh()

    @property
    def gone(self) -> dict[str, TaskState]:
        """The other ranks that are gone, with their states."""
        state = self._rank0.state(0)
        if this_rank.rank0_name and state.is_gone:
            return {this_rank.rank0_name: state}
        return self._gone

    def _report(self, _: Sequence[int]) -> dict[int, Hashable]:
        """Report to the store, whose answer is rank 0's sign of life."""
        try:
            answer = self.store.report(self.rank, self._progress)
        except OSError as error:
            self._awaited, self._apart, self._gone = {}, {}, {}
            has_ended = isinstance(error, ConnectionRefusedError)
            return {0: TaskState.ENDED} if has_ended else {}
        self._awaited, self._apart = answer["awaited"], answer["apart"]
        self._gone = {
            n: TaskState(state) for n, state in answer["gone"].items()
        }
        return {0: ANSWERED}

    def _text(self, ranks: Mapping[str, str], waited_s: float) -> str:
        return (
            f"rank {self.rank} has waited for {waited_s:.0f} s in "
            f"{self._progress.action}: {describe_each(ranks)}."
        )

    def _fail(self, ranks: Mapping[str, str], beats: int) -> None:
        """End a wait for ranks that wait for this one in other exchanges."""
        text = rank_checks.different_things(ranks)
        if not _end_wait(TowerError(text)) and beats >= _BEATS_TO_FAIL:
            end_process(text, code=1)

    def _end(self, ranks: Mapping[str, str], waited_s: float) -> None:
        # Started again, the script would do the same.
        if this_rank.refuse is not None and all(
            state == TaskState.ENDED or state.endswith(store_lib.OUTSIDE)
            for state in ranks.values()
        ):
            error = this_rank.refuse(describe_each(ranks))
            system.limit_teardown()
            if _end_wait(error):
                return
            end_process(str(error), code=1)
        end_process(f"{self._text(ranks, waited_s)} Ending the job.")


def _number_of_updates(begun: Mapping[str, int]) -> int:
    """Return how many updates of engines' optimizers have begun."""
    return sum(n for x, n in begun.items() if x.startswith(activity.UPDATE))


class AnswerWatch(threading.Thread):
    """Polls processes at every beat until it has to report lost ones.

    Args:
        ranks: the processes to poll.
        answers: polls a process, within a time limit of its own and beside
            other polls; returns whether it answers.
        limit_s: a process is lost if silent for longer.
        on_lost: called once, in this thread, with the lost processes.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        answers: Callable[[int], bool],
        limit_s: float,
        on_lost: Callable[[list[int]], None],
    ):
        super().__init__(name="keras-towers-answers", daemon=True)
        self.liveness = Liveness(
            ranks,
            ask_each(lambda rank: ANSWERED if answers(rank) else None),
            limit_s,
        )
        self._on_lost = on_lost
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread, at the latest after the pending polls."""
        self._ended.set()
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        """Poll all processes at every beat."""
        liveness = self.liveness
        while not self._ended.wait(min(liveness.limit_s / 4, settings.BEAT_S)):
            liveness.refresh()
            lost = list(liveness.gone())
            if lost and not self._ended.is_set():
                self._on_lost(lost)
                return


def end_process(text: str, code: int = EXIT_AGAIN) -> NoReturn:
    """End this process, whose main thread cannot receive an exception."""
    print(f"keras_towers: {text}", file=sys.stderr, flush=True)
    os._exit(code)


def start_watch(rank: int, size: int) -> None:
    """Watch this process under a new rank, if others have a store in common."""
    before = this_rank.watch
    if before is not None and (before.rank, before.size) == (rank, size):
        return
    stop_watch()
    # Without a store, as under MPI, Horovod's own inspector does this.
    store = store_lib.store_of_job()
    if size == 1 or store is None:
        return
    warning_s: float = seconds(
        settings.ENV_STALL_WARNING, settings.STALL_WARNING_S
    )
    if os.environ.get(settings.ENV_STALL_DISABLE, "0") != "0":
        warning_s = math.inf
    shutdown_s = seconds(settings.ENV_STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S)
    activity.mark("")
    this_rank.watch = StallWatch(rank, size, store, warning_s, shutdown_s)
    this_rank.watch.start()
    _stop_at_exit()


@functools.cache
def _stop_at_exit() -> None:
    """Stop calls of TensorFlow before it is torn down.

    It is registered once, for a watch that starts later, too: exchanges of
    ranks at the end of the script, registered since, are still watched.
    """
    atexit.register(stop_watch)
    atexit.register(
        lambda: tell_error(this_rank.watch and this_rank.watch.rank)
    )


def tell_error(rank: int | None) -> None:
    """Tell the job the error by which the script of a rank ends, if any.

    Its launcher, and the other ranks, get the text, and whether the failure of
    another rank is why.
    """
    # Python sets it.
    error = cause = getattr(sys, "last_value", None)
    while cause is not None and not isinstance(cause, errors.OtherRankError):
        cause = cause.__cause__ or cause.__context__
    if error is not None:
        told = shorten(error), cause is not None
        store_lib.tell_job(f"{store_lib.ERROR}{rank}", told)


def stop_watch() -> None:
    """Stop watching this process."""
    if this_rank.watch is not None:
        this_rank.watch.stop()
    this_rank.watch = None


def gone_ranks() -> dict[str, TaskState]:
    """Return the states of ranks that are gone, as far as known."""
    if this_rank.watch is None:
        return {}
    this_rank.watch.refresh()
    return this_rank.watch.gone


def wait_for_gone_ranks() -> dict[str, TaskState]:
    """Wait a little until a rank is known as gone; return the known ones."""
    for _ in wait_loop(settings.LEFT_S, settings.NETWORK_POLL_S):
        gone = gone_ranks()
        if gone or this_rank.watch is None:
            return gone
    return {}
