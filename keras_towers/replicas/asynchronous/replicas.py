"""Towers that are replicas: each update averages the gradients of several."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TakesGradients, UpdateCall
from keras_towers.fit.update.one_device import home, updating
from keras_towers.replicas import Coordinator, Group, ReplicaCounts
from keras_towers.replicas.asynchronous.update import UpdateAlone
from keras_towers.replicas.averages import Averages, Part
from keras_towers.replicas.events import Event

_numbers = itertools.count()
_HOST = "/device:CPU:0"


class InStep:
    """Lets a tower train on a batch for each token, as ``pace.Pace``.

    Its gradients go into accumulators; a thread has their averages applied.

    Args:
        update: keeps the weights, and updates them where no thread trains.
        replicas: number of towers, T.
        aggregate: how many gradients an update averages, R.
        shared: whether any tower may take any token.
        begins: called with this object when threads are about to start.
        also: what to do with each update, given its trained variables, or None.
        limit_s: how long an update may take; None: for ever.
    """

    def __init__(
        self,
        update: UpdateAlone,
        replicas: int,
        aggregate: int,
        shared: bool,
        begins: Callable[[InStep], None],
        also: Callable[[Sequence[Any]], Any] | None = None,
        limit_s: float | None = None,
    ):
        self._alone = update
        self._begins = begins
        self._replicas = replicas
        self._aggregate = aggregate
        self._shared = shared
        self._also = also
        self._limit_s = limit_s
        self._coordinator: Coordinator | None = None
        self._counts = ReplicaCounts(0, (0,) * replicas, (0,) * replicas)
        self._apply: Any = None
        self._begun: set[int] = set()
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._made = False

    def _make(self) -> None:
        """Create the resources, when the first step is traced."""
        self._made = True
        self._alone.frees_on_release(self)
        name = f"keras_towers/replicas_{next(_numbers)}"
        self._group = Group(
            name, _HOST, self._replicas, self._aggregate, self._shared
        )
        self._group.initialise()
        self._averages = Averages(name, self._group, _place, self._update)
        with tf.init_scope(), compat.single_device_mode(), tf.device(_HOST):
            self._steps, self._pushed = (
                [
                    tf.Variable(0, dtype=tf.int64, trainable=False)  # pyright: ignore[reportArgumentType]
                    for _ in range(self._replicas)
                ]
                for _ in range(2)
            )

    @property
    def counts(self) -> ReplicaCounts:
        """What has become of the gradients of the last ``fit``."""
        if self._coordinator is None:
            return self._counts
        return self._coordinator.counts

    @property
    def runs(self) -> bool:
        """Whether a ``fit`` is running."""
        return self._coordinator is not None and self._coordinator.is_alive()

    def taker(self, fits: bool) -> TakesGradients:
        if not fits:
            return _Here(self._alone.unscaled(), self._also)
        if not self._made:
            self._make()
        self._averages.begin_trace()
        return self

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._alone.place_optimizer(optimizer)

    def apply(self, call: UpdateCall) -> None:
        """Push the gradients of one tower."""
        self._alone.make_ready(call.optimizer, call.variables)
        tower = tower_lib.current()
        assert tower is not None
        step = self._steps[tower.index].read_value()
        count = self._pushed[tower.index]
        number = count.read_value()
        pushed = self._averages.push(
            call.optimizer,
            call.original,
            call.variables,
            call.grads,
            step,
            self._group.number(tower.index, number),
        )
        with tf.control_dependencies(pushed):
            # Without a write TensorFlow would prune them.
            count.assign(number, read_value=False)

    def _update(self, part: Part, averages: list[Any]) -> None:
        device = home(part.variables)
        with tf.device(device), updating(part.optimizer):
            part.original(averages, part.variables)
            if self._also is not None:
                self._also(part.variables)

    def traced(self) -> None:
        self._averages.end_trace()
        self._apply = None

    def begin(self, failed: Callable[[BaseException], None]) -> None:
        if self._apply is None:
            self._apply = self._averages.function()
        self._failed = failed
        self._group.clear()
        self._averages.begin()
        self._begins(self)
        self._coordinator = Coordinator(
            self._group, self._apply, self._error, limit_s=self._limit_s
        )
        self._begun.clear()
        for replica in range(self._replicas):
            self._group.tell(Event.JOINED, replica)
        self._coordinator.start()

    def _error(self, error: BaseException) -> None:
        self._failed(error)
        self._free()

    def enter(self, tower: int) -> bool:
        if tower not in self._begun:
            self._begun.add(tower)
            self._group.call(("begin", tower), lambda: self._begin(tower))
            return True
        token = self._group.call(("token", tower), lambda: self._token(tower))
        return int(token) >= 0

    def _begin(self, tower: int) -> None:
        self._steps[tower].assign(self._group.step.read_value())

    def _token(self, tower: int) -> tf.Tensor:
        token = self._group.get_token(tower)
        with tf.control_dependencies([self._steps[tower].assign(token)]):
            return tf.identity(token)

    def run(self, tower: int, step: Callable[[], Any]) -> Any:
        self._group.call(("renew", tower), lambda: self._renew(tower))
        result = step()
        self._group.call(("arrive", tower), lambda: self._arrive(tower))
        return result

    def _renew(self, tower: int) -> None:
        """Use a token that was handed out when there was no batch yet."""
        mine = self._steps[tower]
        mine.assign(self._group.local_step(mine.read_value()))

    def _arrive(self, tower: int) -> tf.Operation | None:
        self._pushed[tower].assign_add(1, read_value=False)
        return self._group.arrive(tower, self._steps[tower].read_value())

    def settle(self, whole: bool) -> None:
        if self._coordinator is None:
            return
        if whole:
            self._coordinator.flush()
        else:
            self._coordinator.wait()

    def end(self) -> None:
        if self._coordinator is not None:
            self._free()
            self._coordinator.end()
            self._counts, self._coordinator = self._coordinator.counts, None

    def _free(self) -> None:
        for replica in range(self._replicas):
            self._group.end(replica)

    def forget(self) -> None:
        if self._made:
            self._averages.destroy()
            self._group.destroy()
            self._made = False
            del self._averages, self._group, self._steps, self._pushed
            self._apply = None

    def __del__(self):
        # As with every variable, what is gone here is gone on its device.
        if not sys.is_finalizing():
            self.forget()


class _Here:
    """Takes the gradients of a step that no other replica takes part in.

    Args:
        update: applies them.
        also: what to do with each update, or None.
    """

    def __init__(
        self,
        update: UpdateAlone,
        also: Callable[[Sequence[Any]], Any] | None,
    ):
        self._update = update
        self._also = also

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._update.place_optimizer(optimizer)

    def apply(self, call: UpdateCall) -> None:
        self._update.apply(call)
        if self._also is not None:
            self._also(call.variables)


def _place(variable: Any) -> str:
    return home([variable]) or _HOST
