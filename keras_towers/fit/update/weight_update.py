"""Reduce gradients first, then apply once, as on a single device.

A step of ``fit`` hands each tower's gradients to ``run``; in a custom loop,
``Optimizer.apply`` inside ``strategy.run`` does. They are summed, and Keras's
own ``apply`` then runs on the sums, exactly as on one device. Clipping,
accumulation, loss scaling, weight decay, moving averages and constraints thus
see the gradient of the global batch without special handling. The new weights
are then copied to the towers.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit.context import marks
from keras_towers.fit.contract import (
    TowerConfig,
    UpdateCall,
    check_equal_gradients,
)
from keras_towers.fit.update import optimizers
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.update.step_order import StepOrder
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.model_state import optimizers_in, slots_of
from keras_towers.fit.weights.tower_variables import (
    Copies,
    RelocatedVariables,
    TowerOf,
    component,
)
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
    scaled,
    sum_at_variables,
)

if TYPE_CHECKING:
    from keras_towers.fit.update.local_sgd import LocalSGD
    from keras_towers.fit.update.sharded import Shares


class WeightUpdate:
    """Tower 0 updates the weights and copies them to the other towers.

    The base class of all updates: where trained weights and slot variables
    live, and who updates them. This one makes one update instead of K, with
    slot variables on tower 0 only. ``reduction`` is None if a subclass
    overrides ``_reduce``; with ``rounds``, in which ranks update weights apart,
    it is that of one rank.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        description: a short phrase for ``describe()``.
        builds_optimizers: whether ``make_ready`` has to build them, so that
            their slots are created where they belong.
    """

    name = "once"
    description: str = "weights are updated on tower 0"
    builds_optimizers = False
    # The tower that updates a weight, and on which its slots are created.
    updater: TowerOf = 0
    # The weights that this rank alone updates; None: every rank updates all.
    _only: Shares | None = None

    def __init__(
        self,
        config: TowerConfig,
        reduction: Reduction | None = None,
        rounds: LocalSGD | None = None,
    ):
        self.config = config
        self.copies: Copies = Copies(config, self._mirrors(config))
        self.order: StepOrder = StepOrder(config.transport)
        self.rounds = rounds
        self._reduction = reduction
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()
        if self.name == WeightUpdate.name and self.copies.mirrors:
            self.description += " and copied to the others"

    @staticmethod
    def _mirrors(config: TowerConfig) -> bool:
        """Whether each tower has a copy of the weights."""
        return not devices.all_on_host(config.devices)

    def place(self, variable: keras.Variable) -> bool:
        """Move a weight to where it belongs; return whether it moved."""
        return self.copies.place(variable)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Keep an optimizer's slot variables once."""
        self.take_optimizer(optimizer)
        optimizers.use_default_strategy(optimizer)
        for variable in optimizer.variables:
            self._place_slot(variable)

    def take_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Remember to release an optimizer, which may be half built."""
        self._taken.add(optimizer)

    def _place_slot(self, variable: keras.Variable) -> None:
        self.copies.hold_once(variable)

    def release_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Undo ``place_optimizer`` and ``take_optimizer``."""
        optimizers.use_default_strategy(optimizer)

    def drop_slots_of_others(self) -> None:
        """Keep each slot variable on one rank only, before training steps."""

    def gather_slots(self) -> None:
        """Give all ranks the values of all slot variables. Collective."""

    def end_rounds(self) -> None:
        """Average the weights that ranks updated independently. Collective."""
        if self.rounds is not None:
            self.rounds.end(self.order)

    def restore(self, variable: keras.Variable) -> None:
        """Undo ``place``."""
        self.copies.restore(variable)

    def release(self) -> None:
        """Undo every placement that is still in effect."""
        if self.rounds is not None:
            self.rounds.forget()
        for optimizer in self._taken:
            optimizers.use_default_strategy(optimizer)
        self._taken.clear()
        self.copies.restore_all()

    def apply(self, call: UpdateCall) -> None:
        """Sum the gradients over all replicas, then update once."""
        if self.rounds is not None:
            raise TowerError(
                "sync_every works only with fit() and train_on_batch(): leave "
                "it out in a custom training loop."
            )

        def merge(strategy: Strategy, towers: Any) -> None:
            towers = strategy.experimental_local_results(towers)
            check_equal_gradients(towers)
            self.run(call, [tower.grads for tower in towers])

        tf.distribute.get_replica_context().merge_call(merge, args=(call,))

    def update_outside(self, call: UpdateCall) -> None:
        """Update outside of steps and replicas, as one device does."""
        # Each rank alone: between steps it has the slots of all weights.
        self._update_tower(call, call.grads, self.updater, only=None)
        written = optimizers.variables_of_update(call.optimizer, call.variables)
        variables_lib.copy_to_towers(written, self.updater)

    def run(
        self,
        call: UpdateCall,
        rows: Gradients,
        wholes: Sequence[Any] = (),
        weight: float = 1,
    ) -> None:
        """Update weights, given K towers' parts of N gradients.

        Args:
            call: the call of the optimizer.
            rows: K lists of N parts of gradients; None for gradients in
                ``wholes``.
            wholes: N gradients that all towers share; None for gradients in
                ``rows``.
            weight: a factor of all gradients.
        """
        wholes = wholes or [None for _ in call.grads]
        factor = self.config.gradient_factor * weight
        rows = [_scaled(row, factor) for row in rows]
        whole = dataclasses.replace(call, grads=_scaled(wholes, factor))
        for index, row in enumerate(rows):
            marks.reached(index, "computed", row)
        self.make_ready(call.optimizer, call.variables)
        if self.rounds is not None:
            self.rounds.begin_update(call.optimizer)
        self._update(whole, rows)
        if self.rounds is not None:
            self.rounds.end_update(call.optimizer, self.order)

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
                    optimizer, variables, self.updater, only=self._only
                ):
                    optimizer.build(list(variables))
            self.place_optimizer(optimizer)

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        """Update the weights, given K lists of N parts of gradients."""
        sums = self._sums(call, rows)[0]
        marks.reached(0, "reduced", sums)
        with marks.until(0, "updated"):
            self._update_tower(call, sums, self.updater, self._only)
            variables_lib.copy_to_towers(_written(call), self.updater)

    def _update_tower(
        self,
        call: UpdateCall,
        sums: list[Any],
        index: TowerOf,
        only: Shares | None,
    ) -> None:
        """Update the weights on one tower, as on one device."""
        variables = [component(v, index) for v in call.variables]
        with as_one_device(call.optimizer, call.variables, index, only):
            call.original(sums, variables)

    def _sums(self, call: UpdateCall, rows: Gradients) -> list[list[Any]]:
        """K lists of N sums; None for a missing gradient."""
        present = [grad is not None for grad in rows[0]]
        trained = list(itertools.compress(call.variables, present))
        order = self.order if self.rounds is None else self.rounds.order
        reduced = order.reduce(
            dataclasses.replace(call, grads=list(rows[0])).describe_gradients(),
            [[g for g in row if g is not None] for row in rows],
            lambda rows: self._reduce(rows, trained),
        )
        sums = map(iter, reduced)
        return [
            [
                next(row) if there else whole
                for there, whole in zip(present, call.grads, strict=True)
            ]
            for row in sums
        ]

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        assert self._reduction is not None
        return self._reduction(rows, self.config.devices)


class UpdateEach(WeightUpdate):
    """Every tower applies the same sums to its own copy of the weights."""

    # Without shared memory this can be cheaper than copying the weights.
    name = "each"
    description = "every tower updates its own weights"

    @staticmethod
    def _mirrors(config: TowerConfig) -> bool:
        return True

    def _place_slot(self, variable: keras.Variable) -> None:
        self.copies.place(variable)

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        for index, sums in enumerate(self._sums(call, rows)):
            marks.reached(index, "reduced", sums)
            with marks.until(index, "updated"):
                self._update_tower(call, sums, index, self._only)


class UpdateAtVariable(WeightUpdate):
    """Every trained weight exists once; gradients are summed on its device.

    ``place`` returns the device to hold a given weight.
    """

    name = "at_variable"
    description = "trained weights exist once and are updated in place"

    def __init__(
        self, config: TowerConfig, place: Callable[[keras.Variable], str]
    ):
        super().__init__(config)
        self._device_for = place
        self._relocated = RelocatedVariables(empties=False)

    def place(self, variable: keras.Variable) -> bool:
        """Move a weight to its device; return whether it moved."""
        if variable in self._relocated:
            return False
        moved = self.copies.hold_once(variable)
        if not variable.trainable:
            return moved
        self._relocated.place(variable, self._device_for(variable))
        return True

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put an optimizer's slots beside their weights."""
        super().place_optimizer(optimizer)
        if optimizer.built:
            for slot, weight in slots_of(optimizer):
                if weight in self._relocated and slot not in self._relocated:
                    self._relocated.place(slot, weight._value.device)

    @staticmethod
    def _mirrors(config: TowerConfig) -> bool:
        return False

    def restore(self, variable: keras.Variable) -> None:
        self._relocated.restore(variable)
        super().restore(variable)

    def release(self) -> None:
        try:
            self._relocated.restore_all()
        finally:
            super().release()

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        places = [getattr(v, "_value", v).device for v in variables]
        sums = sum_at_variables(rows, self.config.devices, places)
        return [sums for _ in self.config.devices]


def _written(call: UpdateCall) -> list[Any]:
    """The weights that an update writes, directly or by moving averages."""
    # Moving averages may overwrite all that the optimizer knows.
    averaged = (
        part._trainable_variables
        for part in optimizers_in(call.optimizer)
        if part.use_ema and part.ema_overwrite_frequency
    )
    variables = itertools.chain(call.variables, *averaged)
    return list({id(v): v for v in variables}.values())


def _scaled(grads: Sequence[Any], factor: Any) -> list[Any]:
    """Return gradients times a factor."""
    if isinstance(factor, (int, float)) and factor == 1:
        return list(grads)
    return [None if g is None else scaled(g, factor) for g in grads]
