"""The thread that counts arrivals and applies averages.

``tower_threads.py`` starts it, and so does the chief in
``averaged_updates.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.foundation.errors import TowerError
from keras_towers.replicas.replica_counts import ReplicaCounts
from keras_towers.replicas.replica_group import ReplicaEvent, ReplicaGroup

THREAD_NAME = "keras-towers-coordinator"
# Events that a replica sends itself, between its steps.
_OWN = (ReplicaEvent.ARRIVED, ReplicaEvent.RETURNED, ReplicaEvent.LEFT)


@dataclasses.dataclass
class _Replica:
    """The state of a replica, as the coordinator knows it.

    Attributes:
        quota: how many gradients of an update it computes.
        has_left: whether its data has ended.
        is_lost: whether it has died or stopped.
        pushed: gradients whose arrival has been counted.
        arrived: of these, gradients for the next update.
        used: gradients that entered an average, maybe before their arrival was
            counted.
        untold: of these, gradients that it did not count before it died.
    """

    quota: int
    has_left: bool = False
    is_lost: bool = False
    pushed: int = 0
    arrived: int = 0
    used: int = 0
    untold: int = 0

    def tell(self, pushed: int, is_next: bool) -> None:
        """Count the arrival of a gradient, unless it is counted already.

        A replica may have died before it sent the event of a gradient; its next
        event reports it.

        Args:
            pushed: how many gradients the replica has pushed.
            is_next: whether the last of them is for the next update.
        """
        self.is_lost = False
        if pushed > self.pushed:
            self.pushed = pushed
            self.arrived += int(is_next)

    @property
    def dropped(self) -> int:
        """Gradients that came too late."""
        known = self.arrived + self.used - self.untold
        return max(0, self.pushed - known)


class Coordinator(threading.Thread):
    """Counts arrivals; applies the average of R gradients.

    It does not wait for replicas whose data has ended, nor for lost replicas as
    long as there are backup replicas.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        apply: Callable[[int], Any],
        on_failure: Callable[[BaseException], None],
        limit_s: float,
        until_left: int | None = None,
        send: Callable[[ReplicaEvent], None] | None = None,
    ):
        """Create the thread.

        Args:
            group: the replicas.
            apply: applies the average of so many gradients; returns how many of
                them each replica has computed.
            on_failure: called with the error that ends the thread.
            limit_s: how many seconds another thread waits for this one.
            until_left: how many replicas may leave until all have to end.
            send: sends an event to this thread from another one.
        """
        super().__init__(name=THREAD_NAME, daemon=True)
        self._group = group
        self._aggregate = group.quorum.aggregate
        self._apply = apply
        self._on_failure = on_failure
        self._until_left = until_left
        self._send = send or group.send
        self._limit_s = limit_s
        self._replicas = [_Replica(quota) for quota in group.quorum.quotas]
        self._step = self._first = group.global_step()
        self._waited_for: collections.deque[threading.Event] = (
            collections.deque()
        )
        self._ended = threading.Event()

    @property
    def counts(self) -> ReplicaCounts:
        """The numbers of gradients used and dropped so far."""
        return ReplicaCounts(
            self._step - self._first,
            tuple(replica.used for replica in self._replicas),
            tuple(replica.dropped for replica in self._replicas),
        )

    @property
    def is_over(self) -> bool:
        """Whether enough replicas have left to end the training."""
        left = sum(replica.has_left for replica in self._replicas)
        return self._until_left is not None and left >= self._until_left

    def check_failed(self) -> None:
        """Raise the error of an update running in the background, if any."""

    def wait_until_handled(self, event: ReplicaEvent) -> None:
        """Wait until FLUSH or SYNC, and all earlier events, are handled."""
        if self._ended.is_set():
            return
        done = threading.Event()
        self._waited_for.append(done)
        self._send(event)
        begun = time.monotonic()
        while not done.wait(0.1) and not self._ended.is_set():
            self._check_time(begun)

    def stop(self) -> None:
        """End the thread, and wait for it."""
        if self.is_alive():
            self._send(ReplicaEvent.END)
            begun = time.monotonic()
            self.join(self._limit_s)
            if self.is_alive():
                self._check_time(begun)

    def _check_time(self, begun: float) -> None:
        if time.monotonic() - begun >= self._limit_s:
            raise TowerError(
                "the last gradients were not applied within "
                f"{self._limit_s:g} s: raise stall_timeout_s if the device is "
                "only slow."
            )

    def run(self) -> None:
        """Handle events until the end."""
        try:
            self._begin()
            while True:
                event, number, step, pushed = self._group.next_event()
                if event is ReplicaEvent.END:
                    return
                if event in _OWN:
                    self._replicas[number].tell(pushed, step >= self._step)
                self._handle(event, number)
        except BaseException as error:
            self._on_failure(error)
        finally:
            self._end()
            self._ended.set()

    def _begin(self) -> None:
        """Called first in this thread."""

    def _end(self) -> None:
        # Both functions hold the model.
        del self._apply, self._on_failure

    def _handle(self, event: ReplicaEvent, number: int) -> None:
        replica = self._replicas[number]
        if event is ReplicaEvent.RETURNED:
            replica.untold = max(replica.untold, replica.used - replica.pushed)
        elif event is ReplicaEvent.LOST:
            replica.is_lost = not replica.has_left
        elif event is ReplicaEvent.LEFT:
            replica.has_left = True
            if self.is_over:
                self._end_others()
        arrived = sum(replica.arrived for replica in self._replicas)
        enough = arrived >= self._needed() or event is ReplicaEvent.FLUSH
        if arrived and enough and not self.is_over:
            self._count_update(self._apply(arrived))
        if event in (ReplicaEvent.FLUSH, ReplicaEvent.SYNC):
            self._waited_for.popleft().set()

    def _end_others(self) -> None:
        """End all replicas that have not left."""
        for number, replica in enumerate(self._replicas):
            if not replica.has_left:
                self._group.send_end(number)

    def _needed(self) -> int:
        """Return the number of gradients that the next update waits for."""
        left = [r for r in self._replicas if r.has_left]
        if self._until_left is not None:
            return max(1, self._aggregate - len(left))
        total = sum(replica.quota for replica in self._replicas)
        lost = sum(replica.is_lost for replica in self._replicas)
        total -= min(lost, total - self._aggregate)
        total -= sum(replica.quota for replica in left)
        return max(1, min(self._aggregate, total))

    def _count_update(self, averaged: Sequence[int]) -> None:
        self._step += 1
        for replica, used in zip(self._replicas, averaged, strict=True):
            replica.used += int(used)
            replica.arrived = 0


class EarlyCoordinator(Coordinator):
    """Begins each update before the gradients, one per replica, have arrived.

    Every update needs a gradient of each replica that has not left. A replica
    leaves before it pushes a gradient: the update that waits for it has changed
    no weight, and can be canceled. Here ``apply`` returns a running function.
    """

    _running: Any = None

    def check_failed(self) -> None:
        """Raise the error of the running update, if it has failed."""
        if self._running is not None and self._running.has_failed:
            self._running.wait()

    def _begin(self) -> None:
        self._begin_update()

    def _end(self) -> None:
        self._cancel_update()
        super()._end()

    def _handle(self, event: ReplicaEvent, number: int) -> None:
        if event is ReplicaEvent.UPDATED:
            (averaged,) = self._running.wait()
            self._count_update(averaged)
            self._begin_update()
        elif event is ReplicaEvent.LEFT:
            self._replicas[number].has_left = True
            self._cancel_update()
            self._begin_update()
        elif event is ReplicaEvent.STOPPED:
            # The others may have begun a step that one device does not make.
            self._cancel_update()
            self._replicas[number].has_left = True
            self._end_others()
            for replica in self._replicas:
                replica.has_left = True
        elif event in (ReplicaEvent.FLUSH, ReplicaEvent.SYNC):
            self._waited_for.popleft().set()

    def _begin_update(self) -> None:
        """Begin the next update, unless all replicas have left."""
        here = sum(not replica.has_left for replica in self._replicas)
        self._running = self._apply(here) if here else None

    def _cancel_update(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None
