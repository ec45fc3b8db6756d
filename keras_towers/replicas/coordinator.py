"""The threads that apply averages and hand out tokens."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.errors import TowerError
from keras_towers.replicas.group import Event, Group
from keras_towers.replicas.quorum import ReplicaCounts

if TYPE_CHECKING:
    from keras_towers.parameter_servers.remote import Running

NAME = "keras_towers-coordinator"


@dataclasses.dataclass
class _Replica:
    """What the coordinator knows about a replica.

    Attributes:
        quota: how many gradients of an update it computes.
        is_here: whether it trains.
        has_left: whether its data has ended.
        is_lost: whether it has died or stopped.
        held: tokens that it has not used.
        arrived: gradients for the next update.
        ahead: gradients that were averaged before they arrived.
        used: gradients that entered an average.
        dropped: gradients that came too late.
    """

    quota: int
    is_here: bool = False
    has_left: bool = False
    is_lost: bool = False
    held: int = 0
    arrived: int = 0
    ahead: int = 0
    used: int = 0
    dropped: int = 0

    @property
    def missing(self) -> int:
        """How many tokens it needs for its share of an update."""
        return max(0, self.quota - self.held) if self.is_here else 0


class Coordinator(threading.Thread):
    """Counts arrivals; applies the average as soon as enough have come.

    Where every replica has its own tokens, one that has pushed a gradient gets
    a token with the next update. If that update has already been made without
    it, its gradient was dropped, and it gets a token at once. Replicas whose
    data has ended are not waited for, and neither are those that are lost, as
    long as there are others to spare for them.

    A replica that was started again goes on after the last gradient that it had
    pushed: it gets a token when it may push the next one.
    """

    def __init__(
        self,
        group: Group,
        apply: Callable[[int, Sequence[int]], Any],
        failed: Callable[[BaseException], None],
        until_left: int | None = None,
        send: Callable[[Event], None] | None = None,
        limit_s: float | None = None,
    ):
        """Create the thread; all replicas end when ``until_left`` have left."""
        super().__init__(name=NAME, daemon=True)
        self._group = group
        self._aggregate = group.quorum.aggregate
        self._shared = group.quorum.shared
        self._apply = apply
        self._failed = failed
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

    def check(self) -> None:
        """Raise the error of an update running in the background, if any."""

    def settle(self, event: Event) -> None:
        """Wait until FLUSH, or ASKED, and all earlier events are handled."""
        if self._ended.is_set():
            return
        done = threading.Event()
        self._waited_for.append(done)
        self._send(event)
        begun = time.monotonic()
        while not done.wait(0.1) and not self._ended.is_set():
            self._check(begun)

    def end(self) -> None:
        """End the thread, and wait for it."""
        if self.is_alive():
            self._send(Event.END)
            begun = time.monotonic()
            self.join(self._limit_s)
            if self.is_alive():
                self._check(begun)

    def _check(self, begun: float) -> None:
        limit_s = self._limit_s
        if limit_s is not None and time.monotonic() - begun >= limit_s:
            raise TowerError(
                f"The last gradients were not applied within {limit_s:g} s. "
                "Raise stall_shutdown_s if the device is only slow."
            )

    def run(self) -> None:
        """Handle events until the end."""
        try:
            self._begin()
            while True:
                event, replica, step = self._group.next_event()
                if event is Event.END:
                    return
                self._handle(event, replica, step)
        except BaseException as error:
            self._failed(error)
        finally:
            self._end()
            self._ended.set()

    def _begin(self) -> None:
        if self._shared:
            # Each replica has one, or will get one when it enters.
            (tokens,) = self._tokens()
            self._group.hand_out([tokens - len(self._replicas)])

    def _end(self) -> None:
        # It keeps the model.
        del self._apply

    def _handle(self, event: Event, number: int, step: int) -> None:
        replica = self._replicas[number]
        if event in (Event.STARTED, Event.ENTERED):
            self._enter(number, held=int(event is Event.STARTED))
        elif event is Event.LOST:
            replica.is_lost = not replica.has_left
        elif event is Event.LEFT:
            replica.is_here = replica.is_lost = False
            replica.has_left = True
            if self.is_over:
                for straggler, other in enumerate(self._replicas):
                    if other.is_here:
                        self._group.end(straggler)
        elif event is Event.ARRIVED:
            self._count(number, step)
        arrived = sum(replica.arrived for replica in self._replicas)
        enough = arrived >= self._needed()
        if arrived and (enough or event is Event.FLUSH) and not self.is_over:
            self._update(arrived)
        if event in (Event.FLUSH, Event.ASKED):
            self._waited_for.popleft().set()

    def _enter(self, number: int, held: int) -> None:
        replica = self._replicas[number]
        replica.is_here = True
        replica.has_left = replica.is_lost = False
        replica.held = held
        # The arrival of what it had pushed before it died does not come.
        replica.ahead = 0
        if self._shared and not held:
            self._group.hand_out([1])
        self._give_now(number)

    def _count(self, number: int, step: int) -> None:
        replica = self._replicas[number]
        replica.is_lost = False
        replica.held -= 1
        if replica.ahead:
            replica.ahead -= 1
            self._give_now(number)
        elif step < self._step:
            replica.dropped += 1
            self._give_now(number)
        else:
            replica.arrived += 1

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
        tokens = self._tokens()
        averaged = self._apply(arrived, tokens)
        self._step += 1
        for replica, used in zip(self._replicas, averaged, strict=True):
            replica.used += used
            replica.ahead += used - replica.arrived
            replica.arrived = 0
            if not self._shared:
                # One that died may have pushed without an arrival.
                replica.ahead = min(replica.ahead, replica.held)
        if not self._shared:
            for replica, given in zip(self._replicas, tokens, strict=True):
                replica.held += given

    def _tokens(self) -> list[int]:
        """How many tokens each queue gets with an update."""
        if self._shared:
            return [max(self._aggregate, len(self._replicas))]
        return [replica.missing for replica in self._replicas]

    def _give_now(self, number: int) -> None:
        """Hand out the tokens of one replica between two updates."""
        replica = self._replicas[number]
        # What it has pushed for this step counts as if it were held.
        missing = replica.missing - replica.arrived
        if self._shared or missing <= 0:
            return
        tokens = [0] * len(self._replicas)
        tokens[number] = missing
        self._group.hand_out(tokens)
        replica.held += missing


class EarlyCoordinator(Coordinator):
    """Begins each update before the gradients, one per replica, have arrived.

    Each weight is then updated as soon as all of its gradients are there, while
    others are still on their way. Every update needs a gradient of each replica
    that has not left, and all of these get a token with it. A replica leaves
    between its gradients: an update that waits for it has begun with no weight,
    and can be broken off. Here ``apply`` returns such an update, which runs.
    """

    _running: Running | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Those that have left and come back: they join the next update.
        self._back: set[int] = set()

    def check(self) -> None:
        """Raise the error of the running update, if it has failed."""
        if self._running is not None and self._running.has_failed:
            self._running.wait()

    def _begin(self) -> None:
        self._renew()

    def _end(self) -> None:
        self._break_off()
        super()._end()

    def _handle(self, event: Event, number: int, step: int) -> None:
        replica = self._replicas[number]
        if event is Event.UPDATED:
            self._count_update()
        elif event is Event.LEFT:
            replica.has_left = True
            self._back.discard(number)
            self._break_off()
            self._renew()
        elif event in (Event.STARTED, Event.ENTERED):
            if replica.has_left:
                self._back.add(number)
            elif event is Event.ENTERED:
                # If it has got one, it does not use the second of a step.
                self._give([number])
            if self._running is None:
                self._renew()
        elif event in (Event.FLUSH, Event.ASKED):
            self._waited_for.popleft().set()

    def _renew(self) -> None:
        """Begin the next update, with the replicas that have returned."""
        back, self._back = self._back, set()
        for number in back:
            self._replicas[number].has_left = False
        tokens = [int(not replica.has_left) for replica in self._replicas]
        if any(tokens):
            self._running = self._apply(sum(tokens), tokens)
        if back:
            self._give(back)

    def _give(self, numbers: Collection[int]) -> None:
        everybody = range(len(self._replicas))
        self._group.hand_out([int(number in numbers) for number in everybody])

    def _count_update(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        (averaged,) = running.wait()
        self._step += 1
        for replica, used in zip(self._replicas, averaged, strict=True):
            replica.used += int(used)
        self._renew()

    def _break_off(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None
