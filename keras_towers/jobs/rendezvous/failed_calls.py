"""Makes a call that fails on one rank end on all ranks.

Ranks wait for one another in collectives, and no engine knows that a script has
caught an error of its rank and has gone on. So a rank whose call fails reports
it in the job's store, and leaves the collectives. Those of the other ranks then
fail, and so do their calls. Once all ranks have left the call they connect
again, and the next one can begin.

Without a store, ranks connect again when their next call begins, and do not
know each other's errors.

A rank is in one of five states. The thread of its calls and the one that hears
of the failures of others change it, by these events; in a state that the table
does not name, an event changes nothing:

========  =======  =======  ====================================================
event     from     to       it is that
========  =======  =======  ====================================================
begins    BETWEEN  RUNNING  a call begins, or goes on to repeat a step
begins    BROKEN   ABORTED  likewise, while this rank hears that one has failed
ends      RUNNING  BETWEEN  it ends well
fails     BETWEEN  BROKEN   a call has failed, on another rank
fails     RUNNING  ABORTED  likewise, or on this one: what it waits for is ended
ends      ABORTED  BROKEN   its call ends by that, or in spite of it
leaves    BROKEN   LEAVING  it waits until all have left their calls
is free   LEAVING  BROKEN   all have, and the next round begins; or not in time
connects  BROKEN   BETWEEN  the ranks have connected again
========  =======  =======  ====================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from keras_towers.foundation import settings
from keras_towers.foundation.errors import FAILED_ON
from keras_towers.foundation.message_lists import describe_each
from keras_towers.jobs.rendezvous import activity, store as store_lib, watch
from keras_towers.jobs.rendezvous.rank_checks import Peers

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


class State(enum.Enum):
    """Where a rank is among the calls that all ranks make."""

    BETWEEN = "between two calls"
    RUNNING = "in a call"
    ABORTED = "in a call, though one has failed since ranks have connected"
    BROKEN = "between two calls, and has to connect again"
    LEAVING = "between two calls, and waits until all are"


NEXT: dict[str, dict[State, State]] = {
    "begins": {State.BETWEEN: State.RUNNING, State.BROKEN: State.ABORTED},
    "ends": {State.RUNNING: State.BETWEEN, State.ABORTED: State.BROKEN},
    "fails": {State.BETWEEN: State.BROKEN, State.RUNNING: State.ABORTED},
    "leaves": {State.BROKEN: State.LEAVING},
    "is free": {State.LEAVING: State.BROKEN},
    "connects": {State.BROKEN: State.BETWEEN},
}
"""The state after each event, by the one before; another one stays."""


class JointCalls:
    """The calls that all ranks make, in this process.

    Attributes:
        state: where this rank is.
        number: of the last call that has begun.
        round: how often ranks have connected again after a failure.
        failed: how many calls have failed.
        why: why the last of them has failed, in one line, for other ranks.
    """

    def __init__(self) -> None:
        self.state: State = State.BETWEEN
        self.number = 0
        self.round = 0
        self.failed = 0
        self.why = "a call has failed on one of the ranks"
        # How often ranks have left again in this round, since some had lost
        # exchanges.
        self._losses = 0
        # The ranks, and the thread, of the last call.
        self._ranks: Abortable | None = None
        self._thread: int | None = None
        # Held where the state must not change meanwhile.
        self._lock = threading.RLock()
        self._listens = False

    def _move(self, *events: str) -> None:
        with self._lock:
            for event in events:
                self.state = NEXT[event].get(self.state, self.state)
                if event == "fails":
                    activity.this_rank.in_order = False

    def begin(self, ranks: Abortable) -> Failure | None:
        """Begin a call; return the failure of another rank in it, if any.

        Raises:
            TowerError: ranks have ended, and cannot connect again.
        """
        missed = self.connect_if_broken(ranks)
        if missed is None:
            self.number += 1
            self._thread = threading.get_ident()
            self._move("begins")
        return missed

    def begin_again(self, ranks: Abortable) -> bool:
        """Begin a call again that was aborted because an earlier one failed.

        Returns:
            Whether that is so, and the ranks have connected again.
        """
        failure = self._failure()
        if failure is None or failure.call >= self.number:
            return False
        self._move("fails", "ends")
        self.number -= 1
        return self.begin(ranks) is None

    def connect_if_broken(self, ranks: Abortable) -> Failure | None:
        """Connect again after a call that has failed, outside of any call.

        Returns:
            Why it has failed, if this rank has not made it.

        Raises:
            TowerError: ranks have ended, and cannot connect again.
        """
        self._listen()
        if not self._is_in_call:
            self._ranks = ranks
        if self.state is not State.BROKEN:
            return None
        failure = self._failure()
        is_missed = failure is not None and failure.call > self.number
        activity.mark("the end of a call that has failed")
        if not self._connect_again(ranks, math.inf):
            gone = describe_each(watch.gone_ranks())
            raise activity.refusal(gone or "the job's store has ended")
        return failure if is_missed else None

    @property
    def _is_in_call(self) -> bool:
        return self.state in (State.RUNNING, State.ABORTED)

    def runs_in_another_thread(self) -> bool:
        """Whether a call runs, but not in this thread."""
        return self._is_in_call and self.are_elsewhere

    @property
    def are_elsewhere(self) -> bool:
        """Whether another thread has made the last call."""
        return self._thread not in (None, threading.get_ident())

    def end(self) -> None:
        """End a call."""
        self._move("ends")

    def fail(self, ranks: Abortable, why: str) -> Failure | None:
        """End a call that has failed, on all ranks.

        Args:
            ranks: the ranks of the call.
            why: the error of this rank.

        Returns:
            The failure of another rank that is the cause, if one is known.
        """
        own = Failure(ranks.rank, self.number, why)
        first = self._first(own)
        self.why = f"the call has ended, {FAILED_ON} rank {first.rank}: "
        self.why += first.why
        self._move("fails", "ends")
        # Also what another thread waits for.
        ranks.abort()
        ranks.leave()
        if store_lib.store_of_job() is None:
            ranks.renew()
        else:
            limit_s, repeats = settings.FAILED_CALL_S, first.repeats
            again = self._connect_again(ranks, limit_s, repeats)
            if again and repeats:
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
        if store_lib.store_of_job() is None:
            return False
        if why is None:
            first = self._failure()
        else:
            own = Failure(ranks.rank, self.number, why, repeats=True)
            first = self._first(own)
        if first is None or not first.repeats:
            return False
        self._move("fails", "ends")
        again = self._connect_again(ranks, math.inf, repeats=True)
        if again:
            self._move("begins")
        return again

    def has_failed(self) -> bool:
        """Whether a call has failed on a rank since ranks have connected."""
        is_sound = self.state in (State.BETWEEN, State.RUNNING)
        return not is_sound or self._failure() is not None

    def _first(self, own: Failure) -> Failure:
        """Report a failure of this rank; return the first one of all ranks."""
        store = store_lib.store_of_job()
        if store is not None:
            with contextlib.suppress(OSError):
                key, value = f"{_FAILED}{self.round}", dataclasses.asdict(own)
                return Failure(**store.setdefault(key, value))
        return own

    def _failure(self, hold_s: float = 0) -> Failure | None:
        """Return the first failure in this round, if any is known."""
        failure = store_lib.ask_job(f"{_FAILED}{self.round}", hold_s)
        return None if failure is None else Failure(**failure)

    def _connect_again(
        self, ranks: Abortable, limit_s: float, repeats: bool = False
    ) -> bool:
        """Connect again once all ranks have left their calls; or return False.

        They, or the store, may be gone, or they do not leave within the limit.
        """
        until = time.monotonic() + limit_s
        self._move("leaves")
        again = store_lib.store_of_job() is not None
        try:
            while again:
                ranks.leave()
                lost = ranks.loses_exchanges and not watch.join_wait()
                again = self._leave_together(ranks, until, lost)
        except OSError:
            return False
        finally:
            with self._lock:
                if not again:
                    self.round, self._losses = self.round + 1, 0
                self._move("is free")
        if not repeats:
            self.failed += 1
        ranks.reconnect()
        activity.this_rank.begin_round(self.round)
        self.number = max(ranks.gather_objects(self.number))
        self._move("connects")
        return True

    def _leave_together(
        self, ranks: Abortable, until: float, lost: bool
    ) -> bool:
        """Leave a call with all ranks; return whether to do it again.

        Args:
            ranks: the ranks.
            until: when to give up, by ``time.monotonic``.
            lost: whether this rank waits in an exchange that is lost.

        Raises:
            OSError: not all ranks have left their calls; or the store is gone.
        """
        store, number = store_lib.store_of_job(), f"{self.round}-{self._losses}"
        assert store is not None

        def all_do(act: Callable[[], None], key: str, part: int | None) -> Any:
            """Act until all ranks have acted; return their parts."""
            act()
            give, hold_s = functools.partial(store.give, key), settings.POLL_S
            own = ranks.rank, ranks.size, part
            while (parts := give(*own, hold_s)[1]) is None:
                if time.monotonic() > until or watch.gone_ranks():
                    raise TimeoutError
                act()
                hold_s = min(2 * hold_s, settings.HOLD_S)
            return parts

        part = ranks.rank if lost else None
        losers = all_do(ranks.leave, f"{_LEFT}{number}", part)
        all_do(ranks.renew, f"{_RENEWED}{number}", None)
        if losers:
            # The engine finds what it has lost, and ends that with the rest.
            ranks.reconnect()
            ranks.leave()
            self._losses += 1
        return bool(losers)

    def _listen(self) -> None:
        """Start the thread that waits for failures of other ranks."""
        if not self._listens and store_lib.store_of_job() is not None:
            self._listens = True
            threading.Thread(
                target=self._hear, name="keras-towers-failures", daemon=True
            ).start()

    def _hear(self) -> None:
        while True:
            round_, begun = self.round, time.monotonic()
            if self._failure(settings.LISTEN_S) is None:
                # The store may be gone.
                if time.monotonic() - begun < settings.LISTEN_S / 2:
                    time.sleep(settings.BEAT_S)
                continue
            late_at = time.monotonic() + settings.BEAT_S
            while self._abort(round_):
                time.sleep(settings.NETWORK_POLL_S)
                if time.monotonic() > late_at:
                    self._abort(round_, ends_lost=True)
                    late_at = time.monotonic() + settings.BEAT_S

    def _abort(self, round_: int, ends_lost: bool = False) -> bool:
        """Abort what this rank waits for in a round that a call has failed.

        Between two calls, Python exchanges values, such as to read a variable.

        Args:
            round_: the number of the round.
            ends_lost: whether to end exchanges that may be lost.

        Returns:
            Whether the round goes on.
        """
        with self._lock, contextlib.suppress(OSError):
            if self.round != round_:
                return False
            self._move("fails")
            ranks = self._ranks
            # While this rank leaves, TensorFlow may make its collectives anew,
            # and a read of a variable, such as a count, would crash.
            if ranks is None or self.state is State.LEAVING:
                return True
            _, in_python, in_graphs = activity.this_rank.exchanges.read()
            if not (self._is_in_call or in_python):
                return True
            ranks.abort()
            may_be_lost = ranks.loses_exchanges and (in_python or in_graphs)
            if ends_lost and may_be_lost:
                # The thread that waits in them then gets an error.
                until = time.monotonic() + settings.FAILED_CALL_S
                self._leave_together(ranks, until, lost=True)
        return True


calls: JointCalls = JointCalls()
"""The only one in this process, whatever the number of its strategies."""
