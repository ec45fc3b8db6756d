"""When towers in threads of their own take the next batch, and update."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import traced
from keras_towers.fit.contract import TakesGradients, UpdateCall
from keras_towers.fit.update.optimizers import home, updating
from keras_towers.replicas import Quorum
from keras_towers.replicas.asynchronous.update import HogwildUpdate
from keras_towers.replicas.averages import Averages
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.group import Event, Group
from keras_towers.replicas.resources import free

_numbers = itertools.count()
_HOST = "/device:CPU:0"


class UpdateSchedule:
    """Lets every tower of a model take batches and update without waiting."""

    def __init__(self, update: HogwildUpdate):
        self._update = update

    @property
    def runs(self) -> bool:
        """Whether a ``fit`` is running whose towers are busy."""
        return False

    def taker(self, fits: bool) -> TakesGradients:
        """Return the update that takes the gradients of a tower."""
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


class ReplicaSchedule(UpdateSchedule):
    """Lets a tower train on a batch for each token; averages are applied."""

    def __init__(
        self,
        update: HogwildUpdate,
        quorum: Quorum,
        begins: Callable[[Coordinator], None],
        limit_s: float | None,
    ):
        super().__init__(update)
        self._begins = begins
        self._quorum = quorum
        self._limit_s = limit_s
        self._coordinator: Coordinator | None = None
        self._failed: Callable[[BaseException], None] = lambda error: None
        # Frees the resources, which are there if a step has been traced.
        self._freed: weakref.finalize | None = None

    def _make(self) -> None:
        self._update.frees_on_release(self)
        name = f"keras_towers/replicas_{next(_numbers)}"
        self._freed = weakref.finalize(self, free, name)
        self._freed.atexit = False
        self._group = Group(name, _HOST, self._quorum)
        self._group.initialise()
        self._averages = Averages(name, self._group, _place, self._apply)

    @property
    def runs(self) -> bool:
        return self._coordinator is not None and self._coordinator.is_alive()

    def taker(self, fits: bool) -> TakesGradients:
        if not fits:
            return super().taker(fits)
        if self._freed is None:
            self._make()
        return self

    def step_of(self, tower: int) -> contextlib.AbstractContextManager[None]:
        return self._averages.step_of(tower)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._update.place_optimizer(optimizer)

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._update.make_ready(optimizer, variables)

    def apply(self, call: UpdateCall) -> None:
        """Push the gradients of one tower."""
        self._update.make_ready(call.optimizer, call.variables)
        tower = traced.current()
        assert tower is not None
        self._averages.push(tower.index, call)

    def _apply(self, call: UpdateCall) -> None:
        device = home(call.variables)
        with tf.device(device), updating(call.optimizer):
            call.run()
            self._update.also(call.variables)

    def begin(self, failed: Callable[[BaseException], None]) -> None:
        apply = self._averages.function()
        self._failed = failed
        self._averages.begin()
        self._coordinator = Coordinator(
            self._group, apply, self._error, limit_s=self._limit_s
        )
        self._begins(self._coordinator)
        for replica in range(self._quorum.replicas):
            self._group.tell(Event.ENTERED, replica)
        self._coordinator.start()

    def _error(self, error: BaseException) -> None:
        self._failed(error)
        self._free()

    def enter(self, tower: int) -> bool:
        (token,) = self._group.calls(
            ("wait", tower), lambda: self._group.wait(tower)
        )
        return int(token) >= 0

    def run(self, tower: int, step: Callable[[], Any]) -> Any:
        if not self._quorum.shared:
            # Its token may have been handed out when there was no batch yet.
            self._group.calls(
                ("start", tower), lambda: self._group.start(tower)
            )
        return step()

    def settle(self, whole: bool) -> None:
        if self._coordinator is not None:
            self._coordinator.settle(Event.FLUSH if whole else Event.ASKED)

    def end(self) -> None:
        if self._coordinator is not None:
            self._free()
            self._coordinator.end()

    def _free(self) -> None:
        for replica in range(self._quorum.replicas):
            self._group.end(replica)

    def forget(self) -> None:
        if self._freed is not None:
            self._freed()
            self._freed = None
            del self._averages, self._group


def _place(variable: Any) -> str:
    return home([variable]) or _HOST
