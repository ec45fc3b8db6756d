"""When towers that run in threads of their own take the next batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from keras_towers.fit.contract import TakesGradients
from keras_towers.replicas.asynchronous.update import HogwildUpdate


class UpdateSchedule:
    """Lets every tower of a model take batches and update without waiting."""

    def __init__(self, update: HogwildUpdate):
        self._update = update

    @property
    def runs(self) -> bool:
        """Whether a ``fit`` is running whose towers are busy."""
        return False

    def taker(self, fits: bool) -> TakesGradients:
        """Return what takes the gradients of a tower."""
        return self._update if fits else self._update.unscaled()

    def step_of(self, tower: int) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the step of a tower is traced."""
        return contextlib.nullcontext()

    def begin(self, failed: Callable[[BaseException], None]) -> None:
        """Begin, before the threads start; ``failed`` ends the training."""

    def enter(self, tower: int) -> bool:
        """Wait, in a tower's thread, for its next batch; False at the end."""
        return True

    def run(self, tower: int, step: Callable[[], Any]) -> Any:
        """Run a step of a tower in its thread."""
        return step()

    def settle(self, whole: bool) -> None:
        """Wait for updates, when all batches have been trained on."""

    def end(self) -> None:
        """Let no thread wait any longer."""

    def forget(self) -> None:
        """Forget all traces."""
