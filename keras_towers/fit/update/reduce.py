"""Reduce gradients first, then apply once, as on a single device.

``Optimizer.apply`` on a tower contributes the tower's gradients to an
all-reduce; Keras's own ``apply`` then runs on the sums, exactly as on one
device. Clipping, accumulation, loss scaling, weight decay, moving averages and
constraints thus see the gradient of the global batch without special handling.
The new weights are then copied to the towers.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit.context import marks
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import (
    TowerConfig,
    UpdateCall,
    check_equal_gradients,
)
from keras_towers.fit.update import optimizers
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.update.order import StepOrder
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.moved import MovedVariables
from keras_towers.fit.weights.spread import SpreadVariables
from keras_towers.fit.weights.state import optimizers_in, slots_of
from keras_towers.fit.weights.variables import TowerOf, component
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
    scaled,
    sum_at_variables,
)

if TYPE_CHECKING:
    from keras_towers.fit.update.rounds import Rounds
    from keras_towers.fit.update.sharded import Shares


class UpdateOnce:
    """Tower 0 updates the weights and copies them to the other towers.

    The base class of all updates: where trained weights and slot variables
    live, and who updates them.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        description: a short phrase for ``describe()``.
        builds_optimizers: whether ``make_ready`` has to build them, so that
            their slots are created where they belong.
    """

    name = "once"
    description = "weights are updated on tower 0 and copied to the others"
    builds_optimizers = False
    # The tower that updates a weight, and on which its slots are created.
    _updater: TowerOf = 0
    # Whether towers that share memory share buffers of the weights.
    _shares_buffers = True
    # The weights that this rank alone updates; None: every rank updates all.
    _only: Shares | None = None

    # One update instead of K, and slot variables on tower 0 only; on towers
    # that share memory, the copies share buffers. ``reduction`` is None if a
    # subclass overrides ``_reduce``; with ``rounds``, in which ranks update
    # weights apart, it is that of one rank.
    def __init__(
        self,
        config: TowerConfig,
        reduction: Reduction | None = None,
        rounds: Rounds | None = None,
    ):
        self.config = config
        self.spread: SpreadVariables = SpreadVariables(config)
        self.order: StepOrder = StepOrder(config.transport)
        self.rounds = rounds
        self._reduction = reduction
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()

    def place(self, variable: keras.Variable) -> bool:
        """Give every tower a copy of a weight; return whether it moved."""
        return self.spread.spread_weight(variable)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Intercept the optimizer's calls; keep its slot variables once."""
        self.take_optimizer(optimizer)
        optimizers.settle(optimizer)
        for variable in optimizer.variables:
            self._place_slot(variable)

    def take_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Intercept the calls of an optimizer, which may be half built."""
        optimizers.take(optimizer, self.config.name)
        self._taken.add(optimizer)

    def _place_slot(self, variable: keras.Variable) -> None:
        value = variable._value
        if isinstance(value, compat.DistributedVariable) and not isinstance(
            value, variables_lib.TowerVariable
        ):
            variable._value = variables_lib.unbind(value)

    def release_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Undo ``place_optimizer`` and ``take_optimizer``."""
        optimizers.give_back(optimizer)

    def drop_slots_of_others(self) -> None:
        """Let one rank alone hold a slot variable: steps of training follow."""

    def gather_slots(self) -> None:
        """Give all ranks the values of all slot variables. Collective."""

    def end_rounds(self) -> None:
        """Average the weights that ranks have updated apart. Collective."""
        if self.rounds is not None:
            self.rounds.end(self.order)

    def take_back(self, variable: keras.Variable) -> None:
        """Undo ``place``."""

    def release(self) -> None:
        """Undo every placement that is still in effect."""
        if self.rounds is not None:
            self.rounds.forget()
        for optimizer in self._taken:
            optimizers.give_back(optimizer)
        self._taken.clear()

    def apply(self, call: UpdateCall) -> None:
        """Sum gradients over all towers, then update once."""
        if self.rounds is not None and tower_lib.current() is None:
            raise TowerError(
                "sync_every trains by fit() and train_on_batch(), which know "
                "this rank's share of a batch, and when a round ends early. In "
                "a loop of your own leave it out."
            )
        mine = dataclasses.replace(call, grads=_weighted(call.grads))

        def merge(strategy: Strategy, towers: Any) -> None:
            towers = strategy.experimental_local_results(towers)
            check_equal_gradients(towers)
            for index, tower in enumerate(towers):
                marks.reached(index, "computed", tower.grads)
            self.make_ready(call.optimizer, call.variables)
            if self.rounds is not None:
                self.rounds.begin_update(call.optimizer)
            self._update(call, [tower.grads for tower in towers])
            if self.rounds is not None:
                self.rounds.end_update(call.optimizer, self.order)

        tf.distribute.get_replica_context().merge_call(merge, args=(mine,))

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer if needed, and place its slot variables."""
        if not optimizer.built and not tf.executing_eagerly():
            # The trace so far treats the optimizer as unbuilt (a loss scale is
            # then a constant).
            compat.make_function_trace_again()
        # Slot variables outlive the graph being traced.
        with tf.init_scope():
            if not optimizer.built:
                with as_one_device(
                    optimizer, variables, self._updater, only=self._only
                ):
                    optimizer.build(list(variables))
            self.place_optimizer(optimizer)

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        """Update the weights, given K lists of N gradients."""
        sums = self._sums(call, rows)[0]
        marks.reached(0, "reduced", sums)
        with marks.until(0, "updated"):
            self._update_tower(call, sums, self._updater)
            variables_lib.copy_to_towers(_written(call), self._updater)

    def _update_tower(
        self, call: UpdateCall, sums: list[Any], index: TowerOf
    ) -> None:
        """Update the weights on one tower, as on one device."""
        mine = [component(v, index) for v in call.variables]
        shared: set[int] = set()
        if self._shares_buffers and self.config.num_towers > 1:
            values = (getattr(v, "_value", v) for v in call.variables)
            shared = {id(component(value, index)) for value in values}
        given = call.optimizer, call.variables, index, shared, self._only
        with as_one_device(*given):
            call.original(sums, mine)

    def _sums(self, call: UpdateCall, rows: Gradients) -> list[list[Any]]:
        """K lists of N sums; None for a missing gradient."""
        present = [grad is not None for grad in call.grads]
        trained = list(itertools.compress(call.variables, present))
        order = self.order if self.rounds is None else self.rounds.order
        reduced = order.reduce(
            call.described(),
            [[g for g in row if g is not None] for row in rows],
            lambda rows: self._reduce(rows, trained),
        )
        sums = map(iter, reduced)
        return [
            [next(row) if there else None for there in present] for row in sums
        ]

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        assert self._reduction is not None
        return self._reduction(rows, self.config.devices)


class UpdateEach(UpdateOnce):
    """Every tower applies the same sums to its own copy of the weights."""

    # Without shared memory this can be cheaper than copying the weights.
    name = "each"
    description = "every tower updates its own weights"
    _shares_buffers = False

    def _place_slot(self, variable: keras.Variable) -> None:
        self.spread.spread(variable, variables_lib.FIRST)

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        for index, sums in enumerate(self._sums(call, rows)):
            marks.reached(index, "reduced", sums)
            with marks.until(index, "updated"):
                self._update_tower(call, sums, index)


class UpdateAtVariable(UpdateOnce):
    """Every trained weight exists once; gradients are summed on its device."""

    # Non-trainable weights get a component on every tower, because a step may
    # write them. ``place`` returns the device to hold a given weight.

    name = "at_variable"
    description = "trained weights exist once and are updated in place"
    _shares_buffers = False

    def __init__(
        self, config: TowerConfig, place: Callable[[keras.Variable], str]
    ):
        super().__init__(config)
        self._place = place
        self._held = MovedVariables(empties=False)

    def place(self, variable: keras.Variable) -> bool:
        """Hold a trainable weight once; spread any other."""
        spread = isinstance(variable._value, variables_lib.TowerVariable)
        if not variable.trainable or spread:
            return super().place(variable)
        if variable in self._held:
            return False
        if isinstance(variable._value, compat.DistributedVariable):
            variable._value = variables_lib.unbind(variable._value)
        self._held.place(variable, self._place(variable))
        return True

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Intercept the optimizer's calls; put slots beside their weights."""
        super().place_optimizer(optimizer)
        if optimizer.built:
            for slot, weight in slots_of(optimizer):
                if weight in self._held and slot not in self._held:
                    self._held.place(slot, weight._value.device)

    def take_back(self, variable: keras.Variable) -> None:
        self._held.give_back(variable)

    def release(self) -> None:
        try:
            self._held.give_all_back()
        finally:
            super().release()

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        places = [getattr(v, "_value", v).device for v in variables]
        sums = sum_at_variables(rows, self.config.devices, places)
        return [sums for _ in self.config.devices]


def _written(call: UpdateCall) -> list[Any]:
    """The weights that a call for some of them writes."""
    # Moving averages may overwrite all that the optimizer knows.
    averaged = (
        part._trainable_variables
        for part in optimizers_in(call.optimizer)
        if part.use_ema and part.ema_overwrite_frequency
    )
    every = itertools.chain(call.variables, *averaged)
    return list({id(v): v for v in every}.values())


def _weighted(grads: list[Any]) -> list[Any]:
    """Weight the gradients, unless ``scale_loss`` has weighted the loss."""
    tower = tower_lib.current()
    weight = 1 if tower is None else tower.gradient_weight
    return [None if g is None else scaled(g, weight) for g in grads]
