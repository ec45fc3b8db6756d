"""Updates that begin before all of their gradients have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.group import Event, Group


class RunningUpdate(Protocol):
    """An update that waits for its gradients."""

    def wait(self) -> Sequence[Any]:
        """Return how many gradients of each replica the update averaged."""
        ...

    def cancel(self) -> Any:
        """Break the update off."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether ``wait`` would raise an error."""
        ...


class EarlyCoordinator(Coordinator):
    """Begins each update before its gradients, one of every replica, come."""

    # Each weight is then updated as soon as all of its gradients are there,
    # while others are still on their way. Every update needs a gradient of each
    # replica that has not left, and all of these get a token with it. A replica
    # leaves between its gradients: an update that waits for it has begun with
    # no weight, and can be broken off.

    def __init__(
        self,
        group: Group,
        begin: Callable[[int, Sequence[int]], RunningUpdate],
        failed: Callable[[BaseException], None],
        tell: Callable[[Event], None] | None = None,
        limit_s: float | None = None,
    ):
        super().__init__(group, _unused, failed, None, tell, limit_s)
        self._begin_update = begin
        self._running: RunningUpdate | None = None
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
        # It keeps the model.
        del self._begin_update

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
        here = [r not in self._left for r in range(len(self._used))]
        if any(here):
            self._running = self._begin_update(sum(here), [*map(int, here)])
        if back:
            self._give(back)

    def _give(self, replicas: Any) -> None:
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


def _unused(count: int, tokens: Sequence[int]) -> Sequence[int]:
    raise NotImplementedError
