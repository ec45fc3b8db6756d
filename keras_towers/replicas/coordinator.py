"""The threads that have averages applied and hand out tokens."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.errors import TowerError
from keras_towers.replicas import ReplicaCounts
from keras_towers.replicas.group import Event, Group

if TYPE_CHECKING:
    from keras_towers.parameter_servers.remote import Running

NAME = "keras_towers-coordinator"


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
        replicas = group.quorum.replicas
        self._quota = group.quorum.quotas
        self._here: set[int] = set()
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._held = [0] * replicas
        self._arrived = [0] * replicas
        # Averaged before their arrival was told.
        self._ahead = [0] * replicas
        self._used = [0] * replicas
        self._dropped = [0] * replicas
        self._step = self._first = group.global_step()
        self._waited_for: collections.deque[threading.Event] = (
            collections.deque()
        )
        self._ended = threading.Event()

    @property
    def counts(self) -> ReplicaCounts:
        """How many gradients were used and dropped so far."""
        return ReplicaCounts(
            self._step - self._first, tuple(self._used), tuple(self._dropped)
        )

    @property
    def is_over(self) -> bool:
        """Whether enough replicas have left to end the training."""
        enough = self._until_left
        return enough is not None and len(self._left) >= enough

    def check(self) -> None:
        """Raise the error of an update that runs by itself, if any."""

    def settle(self, event: Event) -> None:
        """Wait until FLUSH, or ASKED, and all before it have been handled."""
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
            self._group.hand_out([tokens - len(self._held)])

    def _end(self) -> None:
        # It keeps the model.
        del self._apply

    def _handle(self, event: Event, replica: int, step: int) -> None:
        if event in (Event.STARTED, Event.ENTERED):
            self._enter(replica, held=int(event is Event.STARTED))
        elif event is Event.LOST:
            self._lost.update({replica} - self._left)
        elif event is Event.LEFT:
            self._here.discard(replica)
            self._lost.discard(replica)
            self._left.add(replica)
            if self.is_over:
                for straggler in self._here:
                    self._group.end(straggler)
        elif event is Event.ARRIVED:
            self._count(replica, step)
        arrived = sum(self._arrived)
        enough = arrived >= self._needed()
        if arrived and (enough or event is Event.FLUSH) and not self.is_over:
            self._update(arrived)
        if event in (Event.FLUSH, Event.ASKED):
            self._waited_for.popleft().set()

    def _enter(self, replica: int, held: int) -> None:
        self._here.add(replica)
        self._left.discard(replica)
        self._lost.discard(replica)
        self._held[replica] = held
        # What is not told before it returns is not told any more.
        self._ahead[replica] = 0
        if self._shared and not held:
            self._group.hand_out([1])
        self._give_now(replica)

    def _count(self, replica: int, step: int) -> None:
        self._lost.discard(replica)
        self._held[replica] -= 1
        if self._ahead[replica]:
            self._ahead[replica] -= 1
            self._give_now(replica)
        elif step < self._step:
            self._dropped[replica] += 1
            self._give_now(replica)
        else:
            self._arrived[replica] += 1

    def _needed(self) -> int:
        """How many gradients the next update waits for."""
        if self._until_left is not None:
            return max(1, self._aggregate - len(self._left))
        total = sum(self._quota)
        spare = min(len(self._lost), total - self._aggregate)
        left = sum(self._quota[replica] for replica in self._left)
        return max(1, min(self._aggregate, total - left - spare))

    def _update(self, arrived: int) -> None:
        tokens = self._tokens()
        averaged = self._apply(arrived, tokens)
        self._step += 1
        for replica, number in enumerate(averaged):
            self._used[replica] += number
            ahead = self._ahead[replica] + number - self._arrived[replica]
            if not self._shared:
                # One that died may have pushed without telling.
                ahead = min(ahead, self._held[replica])
            self._ahead[replica] = ahead
        self._arrived = [0] * len(averaged)
        if not self._shared:
            for replica, number in enumerate(tokens):
                self._held[replica] += number

    def _tokens(self) -> list[int]:
        """How many tokens each queue gets with an update."""
        if self._shared:
            return [max(self._aggregate, len(self._held))]
        return [self._missing(replica) for replica in range(len(self._held))]

    def _missing(self, replica: int) -> int:
        if replica not in self._here:
            return 0
        return max(0, self._quota[replica] - self._held[replica])

    def _give_now(self, replica: int) -> None:
        """Hand out the tokens of one replica between two updates."""
        if self._shared:
            return
        tokens = [0] * len(self._held)
        # What it has pushed for this step counts as if it were held.
        missing = self._missing(replica) - self._arrived[replica]
        tokens[replica] = max(0, missing)
        if tokens[replica]:
            self._group.hand_out(tokens)
            self._held[replica] += tokens[replica]


class EarlyCoordinator(Coordinator):
    """Begins each update before its gradients, one of every replica, come.

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

    def _handle(self, event: Event, replica: int, step: int) -> None:
        if event is Event.UPDATED:
            self._count_update()
        elif event is Event.LEFT:
            self._left.add(replica)
            self._back.discard(replica)
            self._break_off()
            self._renew()
        elif event in (Event.STARTED, Event.ENTERED):
            if replica in self._left:
                self._back.add(replica)
            elif event is Event.ENTERED:
                # If it has got one, it does not use the second of a step.
                self._give([replica])
            if self._running is None:
                self._renew()
        elif event in (Event.FLUSH, Event.ASKED):
            self._waited_for.popleft().set()

    def _renew(self) -> None:
        """Begin the next update, with the replicas that have come back."""
        back, self._back = self._back, set()
        self._left -= back
        tokens = [int(r not in self._left) for r in range(len(self._used))]
        if any(tokens):
            self._running = self._apply(sum(tokens), tokens)
        if back:
            self._give(back)

    def _give(self, replicas: Collection[int]) -> None:
        everybody = range(len(self._used))
        self._group.hand_out([int(r in replicas) for r in everybody])

    def _count_update(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        (averaged,) = running.wait()
        self._step += 1
        for replica, number in enumerate(averaged):
            self._used[replica] += int(number)
        self._renew()

    def _break_off(self) -> None:
        if self._running is not None:
            self._running.cancel()
            self._running = None
