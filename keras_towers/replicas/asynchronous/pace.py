"""When towers that run in threads of their own take the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from keras_towers.fit.contract import TakesGradients
from keras_towers.replicas.asynchronous.update import UpdateAlone


class Pace(Protocol):
    """Lets the towers of a model run, each in a thread of its own."""

    def taker(self, fits: bool) -> TakesGradients:
        """Return what takes the gradients of a tower.

        Args:
            fits: whether towers run in threads, not one step in the caller's.
        """
        ...

    def traced(self) -> None:
        """The steps of all towers have been traced for one more spec."""
        ...

    def begin(self, failed: Callable[[BaseException], None]) -> None:
        """The threads are about to start.

        Args:
            failed: ends the training with an error.
        """
        ...

    def enter(self, tower: int) -> bool:
        """Wait until a tower may take a batch; return False at the end.

        Called in the thread of the tower.
        """
        ...

    def run(self, tower: int, step: Callable[[], Any]) -> Any:
        """Run a step of a tower in its thread."""
        ...

    def settle(self, whole: bool) -> None:
        """All batches that were handed out have been trained on.

        Args:
            whole: whether all of their gradients are to be applied now.
        """
        ...

    def end(self) -> None:
        """Let no thread wait any longer."""
        ...

    def forget(self) -> None:
        """Forget all traces."""
        ...


class Free:
    """No tower ever waits for another one.

    Args:
        update: applies the gradients of a tower.
    """

    def __init__(self, update: UpdateAlone):
        self._update = update

    def taker(self, fits: bool) -> TakesGradients:
        return self._update if fits else self._update.unscaled()

    def traced(self) -> None:
        pass

    def begin(self, failed: Callable[[BaseException], None]) -> None:
        pass

    def enter(self, tower: int) -> bool:
        return True

    def run(self, tower: int, step: Callable[[], Any]) -> Any:
        return step()

    def settle(self, whole: bool) -> None:
        pass

    def end(self) -> None:
        pass

    def forget(self) -> None:
        pass
