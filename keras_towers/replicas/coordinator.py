"""The thread that applies averages and hands out tokens."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.replicas.quorum import ReplicaCounts
from keras_towers.replicas.replica_group import ReplicaEvent, ReplicaGroup

NAME = "keras_towers-coordinator"


@dataclasses.dataclass
class _Replica:
    """The state of a replica, as the coordinator knows it.

    Attributes:
        quota: how many gradients of an update it computes.
        is_here: whether it trains.
        has_left: whether its data has ended.
        is_lost: whether it has died or stopped.
        arrived: gradients for the next update.
        ahead: gradients that were averaged before their arrival was counted.
        used: gradients that entered an average.
        dropped: gradients that came too late.
    """

    quota: int
    is_here: bool = False
    has_left: bool = False
    is_lost: bool = False
    arrived: int = 0
    ahead: int = 0
    used: int = 0
    dropped: int = 0


class Coordinator(threading.Thread):
    """Counts arrivals; applies the average of R gradients.

    With tokens per replica, a replica that has pushed a gradient gets a token
    with the update that takes it. If that update has already been made, with or
    without the gradient, the replica gets the token at once. The coordinator
    does not wait for replicas whose data has ended, nor for lost replicas as
    long as there are backup replicas.

    A restarted replica goes on after the last gradient that it had pushed: it
    gets a token when it may push the next one.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        apply: Callable[[int, Sequence[int]], Any],
        on_failure: Callable[[BaseException], None],
        until_left: int | None = None,
        send: Callable[[ReplicaEvent], None] | None = None,
        limit_s: float | None = None,
    ):
        """Create the thread; all replicas end when ``until_left`` have left."""
        super().__init__(name=NAME, daemon=True)
        self._group = group
        self._aggregate = group.quorum.aggregate
        self._shared = group.quorum.shared
        self._shared_tokens = group.quorum.most_of_one
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
        """How many gradients were used and dropped so far."""
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
        limit_s = self._limit_s
        if limit_s is not None and time.monotonic() - begun >= limit_s:
            raise TowerError(
                f"the last gradients were not applied within {limit_s:g} s: "
                "raise stall_shutdown_s if the device is only slow."
            )

    def run(self) -> None:
        """Handle events until the end."""
        try:
            self._begin()
            while True:
                event, number, step = self._group.next_event()
                if event is ReplicaEvent.END:
                    return
                self._handle(event, number, step)
        except BaseException as error:
            self._on_failure(error)
        finally:
            self._end()
            self._ended.set()

    def _begin(self) -> None:
        if self._shared:
            # Each replica gets one token when it enters.
            self._give_tokens(0, self._shared_tokens - len(self._replicas))

    def _end(self) -> None:
        # They hold the model.
        del self._apply, self._on_failure

    def _handle(self, event: ReplicaEvent, number: int, step: int) -> None:
        replica = self._replicas[number]
        if event in (ReplicaEvent.STARTED, ReplicaEvent.ENTERED):
            self._enter(number, has_token=event is ReplicaEvent.STARTED)
        elif event is ReplicaEvent.LOST:
            replica.is_lost = not replica.has_left
        elif event is ReplicaEvent.LEFT:
            replica.is_here = replica.is_lost = False
            replica.has_left = True
            if self.is_over:
                for straggler, other in enumerate(self._replicas):
                    if other.is_here:
                        self._group.send_end(straggler)
        elif event is ReplicaEvent.ARRIVED:
            self._count_arrival(number, step)
        arrived = sum(replica.arrived for replica in self._replicas)
        enough = arrived >= self._needed()
        if (
            arrived
            and (enough or event is ReplicaEvent.FLUSH)
            and not self.is_over
        ):
            self._update(arrived)
        if event in (ReplicaEvent.FLUSH, ReplicaEvent.SYNC):
            self._waited_for.popleft().set()

    def _enter(self, number: int, has_token: bool) -> None:
        replica = self._replicas[number]
        replica.is_here = True
        replica.is_lost = False
        # It died before it could send the arrival of its gradients.
        replica.ahead = 0
        tokens = 1 if self._shared else replica.quota - replica.arrived
        self._give_tokens(number, tokens - int(has_token))

    def _give_tokens(self, number: int, tokens: int) -> None:
        """Hand out tokens to a replica between two updates."""
        if tokens > 0:
            given = [0] * self._group.quorum.queues
            given[0 if self._shared else number] = tokens
            self._group.hand_out(given)

    def _count_arrival(self, number: int, step: int) -> None:
        replica = self._replicas[number]
        replica.is_lost = False
        if not replica.ahead and step >= self._step:
            replica.arrived += 1
            return
        if replica.ahead:
            replica.ahead -= 1
        else:
            replica.dropped += 1
        if not self._shared:
            self._give_tokens(number, 1)

    def _needed(self) -> int:
        """How many gradients the next update waits for."""
        left = [r for r in self._replicas if r.has_left]
        if self._until_left is not None:
            return max(1, self._aggregate - len(left))
        total = sum(replica.quota for replica in self._replicas)
        lost = sum(replica.is_lost for replica in self._replicas)
        total -= min(lost, total - self._aggregate)
        total -= sum(replica.quota for replica in left)
        return max(1, min(self._aggregate, total))

    def _update(self, arrived: int) -> None:
        tokens = [self._shared_tokens]
        if not self._shared:
            tokens = [r.arrived if r.is_here else 0 for r in self._replicas]
        averaged = self._apply(arrived, tokens)
        self._step += 1
        for replica, used in zip(self._replicas, averaged, strict=True):
            replica.used += used
            replica.ahead += used - replica.arrived
            if not self._shared:
                # A replica that died may have pushed without an arrival; it
                # sends no more arrivals than it has tokens.
                unused = replica.quota - replica.arrived
                replica.ahead = min(replica.ahead, unused)
            replica.arrived = 0
