"""Makes a call that fails on one rank end on all ranks.

Ranks wait for one another in collectives, and no engine knows that a script has
caught an error of its rank and has gone on. So a rank whose call fails reports
it in the job's store, and leaves the collectives. Those of the other ranks then
fail, and so do their calls. Once all ranks have left the call they connect
again, and the next one can begin.

Without a store, ranks connect again when their next call begins, and do not
know each other's errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from keras_towers.foundation import settings
from keras_towers.foundation.errors import FAILED_ON
from keras_towers.foundation.message_lists import describe_each
from keras_towers.jobs.rendezvous import activity, store as store_lib, watch
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.jobs.rendezvous.store import StoreClient

# Keys of the store, each followed by the number of a round: the first failure;
# that all ranks have left their calls; and that they can connect again.
_FAILED, _LEFT, _RENEWED = "failed-", "left-", "renewed-"


class Abortable(Peers, Protocol):
    """A connection of ranks that can be aborted."""

    @property
    def loses_exchanges(self) -> bool:
        """Whether an exchange that begins while ranks leave may be lost.

        It then ends only when they connect again, and leave again.
        """
        ...

    def abort(self) -> None:
        """End the collectives in which this rank waits, with an error.

        Another thread calls it again and again, until the call of the rank has
        ended.
        """
        ...

    def leave(self) -> None:
        """End the collectives in which others wait for this rank.

        It is called when this rank has left its call, and then again and again
        until all ranks have left theirs.
        """
        ...

    def renew(self) -> None:
        """Make collectives possible again, once all ranks have left theirs.

        Messages of the failed call must not reach the next one.
        """
        ...

    def reconnect(self) -> None:
        """Connect again, once all ranks have called ``renew``. Collective."""
        ...


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of a call.

    Attributes:
        rank: where it was.
        call: the number of the call.
        why: its error, in one line.
        repeats: whether the ranks go on in this call, and repeat a step.
    """

    rank: int
    call: int
    why: str
    repeats: bool = False


class JointCalls:
    """The calls that all ranks make, in this process.

    Attributes:
        number: of the last call that has begun.
        round: how often ranks have connected again after a failure.
        failed: how many calls have failed.
        why: why the last of them has failed, in one line, for other ranks.
    """

    def __init__(self) -> None:
        self.number = 0
        self.round = 0
        self.failed = 0
        self.why = "a call has failed on one of the ranks"
        self._is_broken = False
        # How often ranks have left again in this round, since some had lost
        # exchanges.
        self._losses = 0
        # The ranks of a call while it runs.
        self._running: Abortable | None = None
        # The ranks of the last call, and whether they connect again.
        self._ranks: Abortable | None = None
        self._connects = False
        self._thread: int | None = None
        self._lock = threading.Lock()
        self._listens = False

    def begin(self, ranks: Abortable) -> Failure | None:
        """Begin a call; return the failure of another rank in it, if any.

        Raises:
            TowerError: ranks have ended, and cannot connect again.
        """
        missed = self.connect_if_broken(ranks)
        if missed is not None:
            return missed
        self.number += 1
        with self._lock:
            self._running = ranks
            self._thread = threading.get_ident()
        return None

    def begin_again(self, ranks: Abortable) -> bool:
        """Begin a call again that was aborted because an earlier one failed.

        Returns:
            Whether that is so, and the ranks have connected again.
        """
        failure = self._failure(store_lib.store_of_job())
        if failure is None or failure.call >= self.number:
            return False
        self.end()
        self.number -= 1
        self._break()
        return self.begin(ranks) is None

    def connect_if_broken(self, ranks: Abortable) -> Failure | None:
        """Connect again after a call that has failed, outside of any call.

        Returns:
            Why it has failed, if this rank has not made it.

        Raises:
            TowerError: ranks have ended, and cannot connect again.
        """
        self._ranks = ranks
        self._listen()
        if not self._is_broken or self._running is not None:
            return None
        failure = self._failure(store_lib.store_of_job())
        is_missed = failure is not None and failure.call > self.number
        activity.mark("the end of a call that has failed")
        if not self._connect_again(ranks, math.inf):
            raise activity.refusal(describe_each(watch.gone_ranks()))
        return failure if is_missed else None

    def runs_in_another_thread(self) -> bool:
        """Whether a call runs, but not in this thread."""
        with self._lock:
            is_here = self._thread == threading.get_ident()
            return self._running is not None and not is_here

    @property
    def are_elsewhere(self) -> bool:
        """Whether another thread has made the last call."""
        return self._thread not in (None, threading.get_ident())

    def end(self) -> None:
        """End a call."""
        with self._lock:
            self._running = None

    def fail(self, ranks: Abortable, why: str) -> Failure | None:
        """End a call that has failed, on all ranks.

        Args:
            ranks: the ranks of the call.
            why: the error of this rank.

        Returns:
            The failure of another rank that is the cause, if one is known.
        """
        store = store_lib.store_of_job()
        own = Failure(ranks.rank, self.number, why)
        first = self._first(store, own)
        self.why = f"the call has ended, {FAILED_ON} rank {first.rank}: "
        self.why += first.why
        self._break()
        self.end()
        # Also what another thread waits for.
        ranks.abort()
        ranks.leave()
        if store is None:
            ranks.renew()
        else:
            limit_s, repeats = settings.FAILED_CALL_S, first.repeats
            again = self._connect_again(ranks, limit_s, repeats)
            if again and first.repeats:
                # The others go on in the call.
                return self.fail(ranks, why)
        # If all ranks fail for the same reason, none is the cause.
        is_cause = first.rank == own.rank or first.why == why
        return None if is_cause else first

    def repeat(self, ranks: Abortable, why: str | None) -> bool:
        """Leave a failed step within a call on all ranks, to repeat it.

        Args:
            ranks: the ranks of the call.
            why: why this rank wants that; None: another one may.

        Returns:
            Whether all ranks have left the step, and have connected again.
        """
        store = store_lib.store_of_job()
        if store is None:
            return False
        if why is None:
            first = self._failure(store)
        else:
            own = Failure(ranks.rank, self.number, why, repeats=True)
            first = self._first(store, own)
        if first is None or not first.repeats:
            return False
        self._break()
        self.end()
        if not self._connect_again(ranks, math.inf, repeats=True):
            return False
        with self._lock:
            self._running = ranks
        return True

    def _break(self) -> None:
        self._is_broken = True
        activity.leave_order()

    def has_failed(self) -> bool:
        """Whether a call has failed on a rank since ranks have connected."""
        store = store_lib.store_of_job()
        return self._is_broken or self._failure(store) is not None

    def _first(self, store: StoreClient | None, own: Failure) -> Failure:
        """Report a failure of this rank; return the first one of all ranks."""
        if store is not None:
            with contextlib.suppress(OSError):
                key, value = f"{_FAILED}{self.round}", dataclasses.asdict(own)
                return Failure(**store.setdefault(key, value))
        return own

    def _failure(
        self, store: StoreClient | None, hold_s: float = 0
    ) -> Failure | None:
        failure = None
        if store is not None:
            with contextlib.suppress(OSError):
                failure = store.get(f"{_FAILED}{self.round}", hold_s)
        return None if failure is None else Failure(**failure)

    def _connect_again(
        self, ranks: Abortable, limit_s: float, repeats: bool = False
    ) -> bool:
        """Connect again once all ranks have left their calls; or return False.

        They may be gone, or not leave within the limit.
        """
        store = store_lib.store_of_job()
        with self._lock:
            self._connects = True
        until, again = time.monotonic() + limit_s, True
        try:
            while store is not None and again:
                ranks.leave()
                lost = ranks.loses_exchanges and not watch.join_wait()
                again = self._leave_together(ranks, store, until, lost)
        except TimeoutError:
            self._connects = False
            return False
        with self._lock:
            self.round += 1
            self._losses, self._connects = 0, False
        if not repeats:
            self.failed += 1
        ranks.reconnect()
        activity.begin_round(self.round)
        self.number = max(ranks.gather_objects(self.number))
        self._is_broken = False
        return True

    def _leave_together(
        self, ranks: Abortable, store: StoreClient, until: float, lost: bool
    ) -> bool:
        """Leave a call with all ranks; return whether to do it again.

        Args:
            ranks: the ranks.
            store: the job's store.
            until: when to give up, by ``time.monotonic``.
            lost: whether this rank waits in an exchange that is lost.

        Raises:
            TimeoutError: not all ranks have left their calls.
        """
        number = f"{self.round}-{self._losses}"
        part = ranks.rank if lost else None
        all_do = functools.partial(self._all_do, ranks, store, until)
        losers = all_do(ranks.leave, f"{_LEFT}{number}", part)
        all_do(ranks.renew, f"{_RENEWED}{number}", None)
        if losers:
            # The engine finds what it has lost, and ends that with the rest.
            ranks.reconnect()
            ranks.leave()
            self._losses += 1
        return bool(losers)

    def _all_do(
        self,
        ranks: Abortable,
        store: StoreClient,
        until: float,
        act: Callable[[], None],
        key: str,
        part: int | None,
    ) -> list[int]:
        """Act again and again until all ranks have acted; return their parts.

        Raises:
            TimeoutError: not all have done so in time, or some are gone.
        """
        act()
        store.give(key, ranks.rank, ranks.size, part)
        hold_s = settings.POLL_S
        while (parts := store.get(key, hold_s)) is None:
            if time.monotonic() > until or watch.gone_ranks():
                raise TimeoutError
            act()
            hold_s = min(2 * hold_s, settings.HOLD_S)
        return parts

    def _listen(self) -> None:
        """Start the thread that waits for failures of other ranks."""
        store = store_lib.store_of_job()
        if not self._listens and store is not None:
            self._listens = True
            threading.Thread(
                target=self._hear,
                args=(store,),
                name="keras-towers-failures",
                daemon=True,
            ).start()

    def _hear(self, store: StoreClient) -> None:
        while True:
            round_ = self.round
            begun = time.monotonic()
            if self._failure(store, settings.LISTEN_S) is None:
                # The store may be gone.
                if time.monotonic() - begun < settings.LISTEN_S / 2:
                    time.sleep(settings.BEAT_S)
                continue
            late_at = time.monotonic() + settings.BEAT_S
            while self._abort(round_):
                time.sleep(settings.NETWORK_POLL_S)
                if time.monotonic() > late_at:
                    self._end_lost(store, round_)
                    late_at = time.monotonic() + settings.BEAT_S

    def _abort(self, round_: int) -> bool:
        """Abort the call that runs in a round; return whether it lasts."""
        with self._lock:
            if self.round != round_:
                return False
            self._break()
            ranks = self._waiting()
            if ranks is not None:
                ranks.abort()
            return True

    def _waiting(self) -> Abortable | None:
        """Return the ranks with which a call, or one of its exchanges, waits.

        Between two calls, Python exchanges values, such as to read a variable.
        """
        _, in_python, _ = activity.exchanges.read()
        between = None if self._connects or not in_python else self._ranks
        return self._running or between

    def _end_lost(self, store: StoreClient, round_: int) -> None:
        """End the running exchanges, if they may be lost.

        The thread that waits in them then gets an error.
        """
        with self._lock, contextlib.suppress(OSError):
            ranks = self._waiting()
            if self.round != round_ or ranks is None:
                return
            _, in_python, in_graphs = activity.exchanges.read()
            if ranks.loses_exchanges and (in_python or in_graphs):
                until = time.monotonic() + settings.FAILED_CALL_S
                self._leave_together(ranks, store, until, lost=True)


calls: JointCalls = JointCalls()
"""The only one in this process, whatever the number of its strategies."""
