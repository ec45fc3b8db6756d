"""The workers of a ``fit``: which ones have left, failed or died.

Each session has one such object (``training_session.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.data.same_data import different_data
from keras_towers.foundation import settings, system
from keras_towers.foundation.errors import TowerError, failed_elsewhere, shorten
from keras_towers.foundation.message_lists import describe_each
from keras_towers.foundation.notices import announce
from keras_towers.jobs.rendezvous.liveness import Liveness, TaskState
from keras_towers.jobs.rendezvous.store import wait_for
from keras_towers.parameter_servers.key_value_store import task_name
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.server_connection import ServerPeers
from keras_towers.parameter_servers.server_process import missing_workers


class FitEnded(Exception):
    """The chief has ended the ``fit`` without this worker."""


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """The state of a worker during a ``fit``, as it publishes it.

    Attributes:
        heartbeat: changes as long as its script goes on.
        begun: whether it has begun to train, maybe before it died.
        left: whether it takes part in no more steps.
        failed: the error that ended its ``fit``, if any.
        goes_on: whether its script has survived that error. It then does not
            come back.
        epoch_begun: the last epoch whose first weights it has: on the chief,
            after callbacks may have written them.
        epoch: the last epoch that has ended.
        epoch_steps: the steps of the ``fit`` before its end; None if they may
            differ between workers.
        steps: of the chief: the steps after which the ``fit`` has ended; None
            before.
    """

    heartbeat: int = 0
    begun: bool = False
    left: bool = False
    failed: str = ""
    goes_on: bool = False
    epoch_begun: int = -1
    epoch: int = -1
    epoch_steps: int | None = None
    steps: int | None = None


class Workers:
    """The workers of one ``fit``, as one of them sees them.

    Attributes:
        own: this worker's status; as it was when it died, if it was restarted.
        steps_done: how many steps of the fit it has made.
    """

    def __init__(self, peers: ServerPeers, fit: int, spare: int = 0):
        """Watch the workers of a fit.

        Args:
            peers: connects the workers.
            fit: the number of the fit.
            spare: how many lost workers the fit tolerates.
        """
        self._connection = connection = peers.connection
        self._key = f"{peers.prefix}/fit_{fit}/status"
        self._stall_timeout_s = peers.stall_timeout_s
        self._spare = spare
        self._rank = connection.rank
        self._others = [r for r in range(connection.size) if r != self._rank]
        self._store = connection.store
        self.own: WorkerStatus = self.status(self._rank)
        self.steps_done: int = 0
        # Another thread may publish an error.
        self._lock = threading.Lock()
        self._last_beat = -settings.BEAT_S
        self._announced: set[int] = set()
        # The error that has ended this worker's fit.
        self._error: BaseException | None = None

    def publish(self, **changes: Any) -> None:
        """Change this worker's status."""
        with self._lock:
            self.own = dataclasses.replace(
                self.own, heartbeat=time.time_ns(), **changes
            )
            status = dataclasses.asdict(self.own)
            self._store.put(f"{self._key}-{self._rank}", status)

    def status(self, rank: int) -> WorkerStatus:
        """The status of a worker."""
        return self._statuses([rank])[rank]

    def _statuses(self, ranks: Sequence[int]) -> dict[int, WorkerStatus]:
        statuses = self._store.by_rank(self._key, ranks)
        return {rank: WorkerStatus(**statuses.get(rank, {})) for rank in ranks}

    def _new_watch(self) -> Liveness:
        def heartbeats(ranks: Sequence[int]) -> dict[int, int | None]:
            statuses = self._statuses(ranks)
            return {rank: s.heartbeat or None for rank, s in statuses.items()}

        ranks = range(self._connection.size)
        return Liveness(ranks, heartbeats, settings.LOST_S)

    def _unreachable(self) -> dict[int, TaskState]:
        """The workers that have not answered a server for long."""
        states = missing_workers(self._store, self._connection.prefix)
        return {rank: s for rank, s in states.items() if s.is_gone}

    def publish_begun(self) -> bool:
        """Publish that this worker trains; return whether it is returning."""
        is_back = self.own.begun
        self.publish(begun=True, failed="", goes_on=False)
        return is_back

    def beat(self) -> None:
        """Publish a sign of life; announce workers that failed or have gone.

        No more often than necessary.
        """
        now = time.monotonic()
        if now - self._last_beat < settings.BEAT_S:
            return
        self._last_beat = now
        self.publish()
        gone, statuses = self._unreachable(), self._statuses(self._others)
        for rank in self._others:
            failed = statuses[rank].failed
            state = gone.get(rank) or (failed and f"has failed ({failed})")
            if not state or rank in self._announced:
                continue
            self._announced.add(rank)
            then = "fit continues where possible"
            if state != TaskState.LOST:
                then = (
                    f"if {self._name(self._rank)} needs this worker, it waits "
                    f"{self._stall_timeout_s:g} s at most for its return"
                )
            announce(
                f"{self._name(rank)} at {self._address(rank)} {state}: {then}"
            )

    def fail(self, error: BaseException) -> None:
        """Publish the error that ended this worker's ``fit``, if possible."""
        self._error = error
        self._publish_if_possible(failed=shorten(error))
        # A process that the error ends may be started again, and come back.
        timer = threading.Timer(settings.LOST_S, self.go_on)
        timer.daemon = True
        timer.start()

    def go_on(self) -> None:
        """Publish that the script has survived the error of its ``fit``."""
        fails = self._error is not None and not self.own.goes_on
        if fails and threading.main_thread().is_alive():
            self._publish_if_possible(goes_on=True)

    def _publish_if_possible(self, **changes: Any) -> None:
        with contextlib.suppress(tf.errors.OpError, TowerError):
            self.publish(**changes)

    def check_failed(self) -> None:
        """Raise the error that ended this ``fit`` or the chief's, if any."""
        if self._error is not None:
            raise self._error
        if self._rank > 0:
            self._check_chief()

    def _check_chief(self) -> WorkerStatus:
        self.beat()
        chief = self.status(0)
        if chief.failed:
            raise TowerError(
                "fit has failed on the chief, and so on this worker: "
                f"{chief.failed}"
            )
        if 0 in self._unreachable():
            system.limit_teardown()
            raise TowerError(
                f"the chief can no longer be reached at {self._address(0)}: "
                "start all tasks of the job again, from a backup."
            )
        return chief

    def wait_for_chief(
        self, begun: float = math.inf, ended: float = math.inf
    ) -> None:
        """Wait until the chief has begun or ended an epoch, or the ``fit``."""

        def is_there(chief: WorkerStatus) -> bool:
            return (
                chief.steps is not None
                or chief.epoch_begun >= begun
                or chief.epoch >= ended
            )

        watch = self._new_watch()
        while not self._becomes(0, is_there):
            watch.refresh()
            if is_there(self._check_chief()):
                return
            self._check_silent(0, watch)

    def wait_until_begun(self, epoch: int) -> None:
        """Wait until the others have begun an epoch, or left; on the chief."""
        watch = self._new_watch()
        poll = self.poller(watch=watch)
        for rank in self._others:
            while not self._becomes(
                rank, lambda other: other.left or other.epoch_begun >= epoch
            ):
                poll()
                self._check_silent(rank, watch)

    def _check_silent(self, rank: int, watch: Liveness) -> None:
        """Raise an error if a worker has been silent for too long."""
        silent_s = watch.silent_s(rank)
        if silent_s > self._stall_timeout_s:
            name = "the chief" if rank == 0 else self._name(rank)
            raise TowerError(
                f"{self._name(self._rank)} waits for {name}, which has given "
                f"no sign of life for {silent_s:.0f} s: it hangs, or was "
                "stopped. Start all tasks of the job again, from a backup, or "
                "give stall_timeout_s=..., in seconds, to wait longer."
            )

    def _becomes(
        self, rank: int, is_there: Callable[[WorkerStatus], bool]
    ) -> bool:
        """Whether a worker's status becomes as wanted within a short time."""
        with contextlib.suppress(TimeoutError):
            wait_for(
                lambda _: is_there(self.status(rank)) or None,
                settings.LIVENESS_CHECK_S,
            )
            return True
        return False

    def poller(
        self,
        in_step: bool = False,
        needs_all: bool = False,
        watch: Liveness | None = None,
    ) -> Callable[[], None]:
        """Return a function to call while waiting for the other workers.

        It raises the error by which the wait ends, if any.

        Args:
            in_step: whether ``FitEnded`` is raised once the chief has ended
                the ``fit``.
            needs_all: whether no worker can be spared.
            watch: where heartbeats are noted; None: in a new one.
        """
        watch = watch or self._new_watch()
        spare = 0 if needs_all else self._spare

        def poll() -> None:
            watch.refresh()
            if self._error is not None:
                raise self._error
            if self._rank == 0:
                self.beat()
            elif self._check_chief().steps is not None and in_step:
                raise FitEnded
            self._check_lost(spare)
            if in_step:
                self.check_same_data()

        return poll

    def check_same_data(self) -> None:
        """Raise an error if another worker has read fewer or more batches."""
        own = self.own
        for rank, other in self._statuses(self._others).items():
            ended = other.epoch_steps
            if ended is None or other.left:
                continue
            is_short = other.epoch > own.epoch and ended < self.steps_done
            differs = other.epoch == own.epoch and ended != own.epoch_steps
            if is_short or (differs and own.epoch_steps is not None):
                raise different_data(
                    f"{self._name(rank)} has ended epoch {other.epoch + 1} "
                    f"after {ended} steps of this fit, and "
                    f"{self._name(self._rank)} has made {self.steps_done}"
                )

    def _check_lost(self, spare: int) -> None:
        """Raise an error if more workers are lost than can be spared."""
        gone, statuses = self._unreachable(), self._statuses(self._others)
        here = self._name(self._rank)
        needed = [rank for rank in self._others if not statuses[rank].left]
        lost = [rank for rank in needed if gone.get(rank) == TaskState.LOST]
        failed = [r for r in needed if statuses[r].goes_on and r not in lost]
        if len(lost) + len(failed) <= spare:
            return
        if lost:
            system.limit_teardown()
            named = (f"{self._name(r)} at {self._address(r)}" for r in lost)
            states = describe_each(dict.fromkeys(named, TaskState.LOST))
            raise TowerError(
                f"{here} must end: {states}. Start all tasks of the job "
                "again, from a backup."
            )
        raise failed_elsewhere(
            f"fit has ended on {here}",
            f"{self._name(failed[0])}: {statuses[failed[0]].failed}",
        )

    def loss_poller(self, on_lost: Callable[[int], None]) -> Callable[[], None]:
        """Return a function to call regularly, which reports lost workers.

        Any thread may call it: it is no sign that this worker's script goes
        on. Each loss is reported once.
        """
        watch = self._new_watch()
        reported: set[int] = set()

        def poll() -> None:
            lost = self._why_stuck(watch, self._stall_timeout_s)
            # A worker that recovers may be lost again.
            reported.intersection_update(lost)
            for rank in lost.keys() - reported:
                reported.add(rank)
                on_lost(rank)

        return poll

    def wait_for_others(self, is_over: Callable[[], bool]) -> None:
        """Wait until all living workers have left.

        Args:
            is_over: whether no update needs more gradients. The workers that
                remain are then given no more time than lost ones.
        """
        watch = self._new_watch()
        missing = list(self._others)
        announced, updated = False, time.monotonic()
        while missing:
            self._becomes(missing[0], lambda status: status.left)
            self.beat()
            statuses = self._statuses(missing)
            missing = [rank for rank in missing if not statuses[rank].left]
            stuck = self._why_stuck(watch, self._stall_timeout_s)
            if not is_over():
                updated = time.monotonic()
            elif time.monotonic() - updated > settings.LOST_S:
                late = dict.fromkeys(missing, "does not answer")
                stuck = {**late, **stuck}
            for rank in stuck.keys() & missing:
                missing.remove(rank)
                announce(
                    f"{self._name(rank)} {stuck[rank]}: fit ends without it"
                )
            if missing and not announced:
                announced = True
                names = ", ".join(map(self._name, missing))
                announce(f"the chief waits for {names} to end its fit")

    def _why_stuck(self, watch: Liveness, limit_s: float) -> dict[int, str]:
        """Return why other workers may be stuck, by rank."""
        watch.refresh()
        gone, statuses = self._unreachable(), self._statuses(self._others)
        reasons = {}
        for rank in self._others:
            failed, silent_s = statuses[rank].failed, watch.silent_s(rank)
            if failed:
                reasons[rank] = f"has failed ({failed})"
            elif rank in gone:
                reasons[rank] = "can no longer be reached"
            elif silent_s > limit_s:
                reasons[rank] = (
                    f"has given no sign of life for {silent_s:.0f} s"
                )
        return reasons

    def wait_for(
        self, running: RunningFunction, in_step: bool = False
    ) -> list[tf.Tensor]:
        """Wait for a running function; fail if it takes too long."""
        watch = self._new_watch()
        poll = self.poller(in_step, watch=watch)
        timeout_s = self._stall_timeout_s
        with self._connection.naming_lost_servers():
            try:
                return running.wait(timeout_s, poll)
            except TimeoutError:
                limit_s = min(settings.LOST_S, timeout_s / 2)
                stuck = self._why_stuck(watch, limit_s)
        reasons = {self._name(rank): why for rank, why in stuck.items()}
        raise TowerError(
            f"{self._name(self._rank)} has waited {timeout_s:g} s for the "
            "other workers: "
            f"{describe_each(reasons) or 'one hangs or is very slow'}. Start "
            "it again, or give stall_timeout_s=..., in seconds, to wait "
            "longer."
        )

    def _name(self, rank: int) -> str:
        return task_name(self._connection.cluster, rank)

    def _address(self, rank: int) -> str:
        return self._connection.cluster.workers[rank]
