"""Workers of a ``fit`` that leave, fail or die."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import settings, system
from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.parameter_servers import remote
from keras_towers.parameter_servers.connection import ServerPeers
from keras_towers.parameter_servers.server_store import task_name
from keras_towers.parameter_servers.serving import missing_workers
from keras_towers.rendezvous.liveness import Liveness, State
from keras_towers.rendezvous.store import wait_for


class FitEnded(Exception):
    """The chief has ended the ``fit`` without this worker."""


class Workers:
    """The workers of one ``fit``, as one of them sees them."""

    def __init__(self, peers: ServerPeers, fit: int, spare: int = 0):
        """Watch the workers of a fit.

        Args:
            peers: connects the workers.
            fit: the number of the fit.
            spare: how many lost workers the fit tolerates.
        """
        self._connection = connection = peers.connection
        self._name = name = f"{peers.prefix}/fit_{fit}"
        self._stall_shutdown_s = peers.stall_shutdown_s
        self._spare = spare
        self._rank = connection.rank
        self._others = [r for r in range(connection.size) if r != self._rank]
        self._store = connection.store
        # With the number of the chief's steps.
        self._ended = f"{name}/ended"
        self._last_beat = -settings.BEAT_S
        self._announced: set[int] = set()
        # What has ended this worker's fit.
        self._error: BaseException | None = None

    def begin(self) -> bool:
        """Publish that this worker trains; return whether it is returning."""
        back = self._store.get(self._key("begun")) is not None
        self._store.put(self._key("begun"), True)
        self._store.put(self._key("failed"), "")
        return back

    def _begin_to_watch(self) -> Liveness:
        heartbeats = functools.partial(
            self._store.by_rank, f"{self._name}/heartbeat"
        )
        ranks = range(self._connection.size)
        return Liveness(ranks, heartbeats, settings.LOST_S)

    def _unreachable(self) -> dict[int, State]:
        """The workers that have not answered a server for long."""
        states = missing_workers(self._store, self._connection.prefix)
        return {rank: s for rank, s in states.items() if s.is_gone}

    def beat(self) -> None:
        """Publish a sign of life, no more often than necessary."""
        now = time.monotonic()
        if now - self._last_beat < settings.BEAT_S:
            return
        self._last_beat = now
        self._store.put(self._key("heartbeat"), time.time_ns())
        self._announce_gone()

    def _announce_gone(self) -> None:
        """Announce, once, each worker that has stopped answering."""
        for rank, state in self._unreachable().items():
            if rank in self._announced or rank == self._rank:
                continue
            self._announced.add(rank)
            then = "fit continues where possible"
            if state == State.ENDED:
                then = (
                    f"if {self._who(self._rank)} needs it, it waits for its "
                    f"return, for {self._stall_shutdown_s:g} s at most"
                )
            announce(f"{self._who(rank)} at {self._at(rank)} {state}: {then}")

    def leave(self) -> None:
        """Publish that this worker has left."""
        self._store.put(self._key("left"), True)

    def has_left(self) -> bool:
        """Whether this worker has left, maybe before it died."""
        return self._store.get(self._key("left")) is not None

    def end(self, steps: int) -> None:
        """Publish that the ``fit`` has ended; on the chief only."""
        self._store.put(self._ended, steps)

    def ended_after(self) -> int | None:
        """The number of steps after which the chief ended; None before."""
        steps: int | None = self._store.get(self._ended)
        return steps

    def end_epoch(self, epoch: int) -> None:
        """Publish that an epoch has ended; on the chief only."""
        self._store.put(self._epoch(epoch), True)

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the chief has ended an epoch, or the ``fit``."""
        self._wait_for_chief(self._epoch(epoch))

    def wait_for_end(self) -> None:
        """Wait until the chief has ended the ``fit``."""
        self._wait_for_chief(self._ended)

    def _wait_for_chief(self, key: str) -> None:
        watch = self._begin_to_watch()
        while not self._happened(key):
            self._look_at_chief(watch)
            silent_s = watch.silent_s(0)
            if self.ended_after() is not None:
                return
            if silent_s > self._stall_shutdown_s:
                raise TowerError(
                    f"{self._who(self._rank)} waits for the chief, which has "
                    f"given no sign of life for {silent_s:.0f} s: it hangs, or "
                    "was stopped. Start all tasks of the job again, from a "
                    "backup, or give stall_shutdown_s=..., in seconds, to wait "
                    "for longer."
                )

    def fail(self, error: BaseException) -> None:
        """Publish the error that ended this worker's ``fit``, if possible."""
        self._error = error
        with contextlib.suppress(tf.errors.OpError, TowerError):
            text = f"{type(error).__name__}: {error}"
            self._store.put(self._key("failed"), text)

    def _look_at_chief(self, watch: Liveness) -> None:
        self.beat()
        watch.refresh()
        failure = self._store.get(f"{self._name}/failed-0")
        if failure:
            raise TowerError(
                f"the chief's fit has failed, and with it this one: {failure}"
            )
        if 0 in self._unreachable():
            system.limit_teardown()
            raise TowerError(
                f"the chief can no longer be reached at {self._at(0)}: start "
                "all tasks of the job again, from a backup."
            )

    def check_failed(self) -> None:
        """Raise the error that ended this ``fit`` or the chief's, if any."""
        if self._error is not None:
            raise self._error
        if self._rank > 0:
            self._look_at_chief(self._begin_to_watch())

    def poller(
        self, in_step: bool = False, needs_all: bool = False
    ) -> Callable[[], None]:
        """Return a polling callback for waits."""
        watch = self._watch = self._begin_to_watch()
        spare = 0 if needs_all else self._spare

        def poll() -> None:
            if self._rank > 0:
                self._look_at_chief(watch)
                if in_step and self.ended_after() is not None:
                    raise FitEnded
            else:
                self.beat()
                watch.refresh()
            gone = self._unreachable()
            lost = [r for r in self._others if gone.get(r) == State.LOST]
            if len(lost) > spare:
                self._check_needed(lost, spare)

        return poll

    def _check_needed(self, gone: Sequence[int], spare: int) -> None:
        left = self._by_rank("left")
        needed = [rank for rank in gone if rank not in left]
        if len(needed) > spare:
            system.limit_teardown()
            lost = (f"{self._who(r)} at {self._at(r)}" for r in needed)
            raise TowerError(
                f"{self._who(self._rank)} has to end: {', '.join(lost)} "
                f"{State.LOST}. Start all tasks of the job again, from a "
                "backup."
            )

    def loss_poller(self, lost: Callable[[int], None]) -> Callable[[], None]:
        """Return a function to call regularly, which detects lost workers."""
        # It may be called in any thread, and is no sign that fit goes on.
        watch = self._begin_to_watch()
        alive = set(self._others)

        def poll() -> None:
            watch.refresh()
            gone = self._unreachable()
            for rank in sorted(alive):
                if self._trouble(watch, gone, rank, self._stall_shutdown_s):
                    alive.discard(rank)
                    lost(rank)

        return poll

    def wait_for_others(self, is_over: Callable[[], bool]) -> None:
        """Wait until all living workers have left."""
        watch = self._begin_to_watch()
        missing = list(self._others)
        announced, over = False, None
        while missing:
            happened = self._happened(f"{self._name}/left-{missing[0]}")
            left = self._by_rank("left")
            missing = [rank for rank in missing if rank not in left]
            if happened:
                continue
            self.beat()
            watch.refresh()
            gone, failed = self._unreachable(), self._by_rank("failed")
            if over is None and is_over():
                over = time.monotonic()
            late = (
                over is not None and time.monotonic() - over > settings.LOST_S
            )
            for rank in list(missing):
                why = self._trouble(watch, gone, rank, self._stall_shutdown_s)
                if failed.get(rank):
                    why = "has failed"
                elif late:
                    why = "does not answer"
                if why:
                    missing.remove(rank)
                    announce(f"{self._who(rank)} {why}: fit ends without it")
            if missing and not announced:
                announced = True
                who = ", ".join(map(self._who, missing))
                announce(f"the chief waits for {who} to end its fit")

    def _trouble(
        self,
        watch: Liveness,
        gone: Collection[int],
        rank: int,
        limit_s: float,
    ) -> str:
        """Why a worker may be stuck; empty if unknown."""
        silent_s = watch.silent_s(rank)
        if rank in gone:
            return "can no longer be reached"
        if silent_s > limit_s:
            return f"has given no sign of life for {silent_s:.0f} s"
        return ""

    def run(self, function: Any, in_step: bool = False) -> Any:
        """Call a concrete function; fail if it takes too long."""
        return self.wait(remote.Running(function), in_step)

    def wait(self, running: remote.Running, in_step: bool = False) -> Any:
        """Wait for a running function; fail if it takes too long."""
        poll = self.poller(in_step)
        with self._connection.naming_lost_servers():
            try:
                return running.wait(self._stall_shutdown_s, poll)
            except TimeoutError:
                raise self._stalled() from None

    def _stalled(self) -> TowerError:
        """Say which workers may have caused a wait that was too long."""
        timeout_s = self._stall_shutdown_s
        self._watch.refresh()
        gone, failed = self._unreachable(), self._by_rank("failed")
        limit_s = min(settings.LOST_S, timeout_s / 2)
        reasons = []
        for rank in self._others:
            why = self._trouble(self._watch, gone, rank, limit_s)
            if failed.get(rank):
                why = f"has failed ({failed[rank]})"
            if why:
                reasons.append(f"{self._who(rank)} {why}")
        return TowerError(
            f"{self._who(self._rank)} has waited {timeout_s:g} s for the other "
            f"workers: {', '.join(reasons) or 'one hangs or is very slow'}. "
            "Start it again, or give stall_shutdown_s=..., in seconds, to wait "
            "for longer."
        )

    def _who(self, rank: int) -> str:
        return task_name(self._connection.cluster, rank)

    def _at(self, rank: int) -> str:
        return self._connection.cluster.workers[rank]

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}-{self._rank}"

    def _by_rank(self, what: str) -> dict[int, Any]:
        ranks = range(self._connection.size)
        return self._store.by_rank(f"{self._name}/{what}", ranks)

    def _epoch(self, epoch: int) -> str:
        return f"{self._name}/epoch/{epoch}"

    def _happened(self, key: str) -> bool:
        try:
            wait_for(lambda: self._store.get(key), settings.LOOK_S)
        except TimeoutError:
            return False
        return True
