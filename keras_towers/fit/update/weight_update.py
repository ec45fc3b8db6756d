"""Reduce gradients first, then apply once, as on a single device.

A step of ``fit`` passes each tower's gradients to ``reduce_and_apply``; in a
custom loop, ``Optimizer.apply`` inside ``strategy.run`` does. They are summed,
and Keras's own ``apply`` then runs on the sums, exactly as on one device.
Clipping, accumulation, loss scaling, weight decay, moving averages and
constraints thus see the gradient of the global batch without special handling.
The new weights are then copied to the towers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers._strategy import Strategy
from keras_towers.devices import same_device
from keras_towers.errors import TowerError
from keras_towers.fit import marks
from keras_towers.fit.contract import (
    ApplyCall,
    TowerConfig,
    check_equal_gradients,
)
from keras_towers.fit.step_order import ComparedStep, StepOrder
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights.copies import (
    copy_on_tower,
    copy_to_towers,
    native,
)
from keras_towers.fit.weights.model_state import (
    build_optimizer,
    slots_of,
    trained_by,
)
from keras_towers.fit.weights.tower_variables import TowerVariables
from keras_towers.partition.layouts import MeshLayout
from keras_towers.reduction import (
    Gradient,
    Gradients,
    PackedReduction,
    RankSum,
    Reduction,
    scaled,
    sum_at_variables,
)

if TYPE_CHECKING:
    from keras_towers.fit.update.local_sgd import LocalSGD


class WeightUpdate:
    """Tower 0 updates the weights and copies them to the other towers.

    The base class of all updates, which decide where trained weights and slot
    variables live, and which towers update them. This class makes one update
    instead of K, with slot variables on tower 0 only. Without a ``reduction``
    the gradients are summed on the device that updates the weight. With
    ``rank_sum`` this rank's sums are then summed over the ranks; but with
    ``local_sgd`` ranks update their weights independently, and it sums at the
    end of a round.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        description: a short phrase for ``describe()``.
        mirrors: whether each tower has a copy of the weights; None: unless all
            towers are on the host.
        is_traced: whether ``apply`` is traced, and divided with the step.
    """

    name = "once"
    description: str = "weights are updated on tower 0"
    mirrors: bool | None = None
    is_traced = False

    def __init__(
        self,
        config: TowerConfig,
        reduction: Reduction | None = None,
        local_sgd: LocalSGD | None = None,
        rank_sum: RankSum | None = None,
    ):
        self.config = config
        mirrors = self.mirrors
        if mirrors is None:
            mirrors = not devices.all_on_host(config.devices)
        self.variables: TowerVariables = TowerVariables(config, mirrors)
        self.order: StepOrder = StepOrder(config.transport)
        self.local_sgd = local_sgd
        self.rank_sum = rank_sum
        self._reduction = reduction
        if self.name == WeightUpdate.name and self.variables.mirrors:
            self.description += " and copied to the other towers"

    def place(self, variable: keras.Variable) -> bool:
        """Place a weight as the update requires; return whether it moved."""
        return self.variables.place(variable)

    def place_created(self, variable: keras.Variable) -> None:
        """Place a weight that was created in the block, maybe of no model."""
        self.variables.place(variable)

    def divides(self, variable: keras.Variable) -> bool:
        """Whether to divide a weight that is about to be created."""
        return False

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Keep a single copy of an optimizer's slot variables."""
        for variable in optimizer.variables:
            self.variables.hold_once(variable)

    @property
    def divides_over_ranks(self) -> bool:
        """Whether each rank has rows of variables in shards."""
        return False

    def name_places(self, weights: Sequence[Any], number: int) -> None:
        """Name weights whose values all ranks have agreed on."""

    def name_created(self, weight: Any) -> None:
        """Name a weight that all ranks create in a step, with one value."""

    def name_slots(self, optimizers: Sequence[Any]) -> None:
        """Name slots whose values all ranks have agreed on."""

    def note_own_step(self, step: ComparedStep) -> None:
        """Note a step of training that this rank takes by itself."""
        if self.local_sgd is not None:
            self.local_sgd.note_step(step)

    def end_rounds(self) -> None:
        """Average the weights that ranks updated independently. Collective."""
        if self.local_sgd is not None:
            self.local_sgd.end_rounds(self.order)

    def restore(self, variable: keras.Variable) -> None:
        """Put a variable back where it was before."""
        self.variables.restore(variable)

    def release(self) -> None:
        """Put all variables back that are not restored yet."""
        if self.local_sgd is not None:
            self.local_sgd.discard_rounds()
        self.variables.restore_all()

    def apply_in_replica(self, call: ApplyCall) -> None:
        """Sum the gradients over all replicas, then update once."""
        if self.local_sgd is not None:
            raise TowerError(
                "sync_every works only with fit() and train_on_batch(): leave "
                "it out in a custom training loop."
            )

        def merge(strategy: Strategy, towers: Any) -> None:
            towers = strategy.experimental_local_results(towers)
            check_equal_gradients(towers)
            self.reduce_and_apply(call, [tower.grads for tower in towers])

        tf.distribute.get_replica_context().merge_call(merge, args=(call,))

    def apply_in_trace(self, call: ApplyCall) -> dict[str, MeshLayout]:
        """Trace an update with the step, if it ``is_traced``.

        Returns:
            The layouts of gradients, by the names of operations that return
            them.
        """
        raise NotImplementedError

    def sum_traced(
        self, names: Sequence[str], tensors: Sequence[Any]
    ) -> list[Any]:
        """Sum gradients of traced updates over ranks, by a communication hook.

        Args:
            names: the operations of the trace that return them, or shards.
            tensors: what this rank has of them.
        """
        raise NotImplementedError

    def apply_outside(self, call: ApplyCall) -> None:
        """Update outside of steps and replicas, as one device does."""
        self._apply_on_tower(call, call.grads)
        optimizer = call.optimizer
        copy_to_towers([*trained_by(optimizer), *optimizer.variables])

    def reduce_and_apply(
        self,
        call: ApplyCall,
        tower_grads: Gradients,
        shared: Sequence[Any] = (),
        weight: float = 1,
    ) -> None:
        """Update weights, given K towers' summands of N gradients.

        Args:
            call: the call of the optimizer.
            tower_grads: K lists of N summands; None for gradients in
                ``shared``.
            shared: N gradients that are the same on all towers; None for
                gradients in ``tower_grads``.
            weight: a factor of all gradients.
        """
        shared = shared or [None for _ in call.grads]
        factor = self.config.gradient_factor * weight
        tower_grads = [scaled(grads, factor) for grads in tower_grads]
        call = dataclasses.replace(call, grads=scaled(shared, factor))
        for index, grads in enumerate(tower_grads):
            marks.reached(index, "computed", grads)
        self.make_ready(call.optimizer, call.variables)
        if self.local_sgd is None:
            self._apply_update(call, tower_grads)
            return
        with self.local_sgd.around_update(call.optimizer, self.order):
            self._apply_update(call, tower_grads)

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer if needed, and place its slot variables."""
        if not optimizer.built and not tf.executing_eagerly():
            # The trace so far treats the optimizer as unbuilt, with a constant
            # loss scale.
            compat.make_function_trace_again()
        # Slot variables outlive the graph being traced.
        with tf.init_scope():
            if not optimizer.built:
                self.build_whole(optimizer, variables)
            self.place_optimizer(optimizer)

    def build_whole(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build an optimizer as one device does."""
        with as_one_device(optimizer, variables):
            build_optimizer(optimizer, variables)

    def _apply_update(self, call: ApplyCall, tower_grads: Gradients) -> None:
        """Update the weights, given K towers' summands of N gradients."""
        sums = self._sums(call, tower_grads)[0]
        marks.reached(0, "reduced", sums)
        with marks.until(0, "updated"):
            self._apply_on_tower(call, sums)
            # The optimizer may overwrite all its weights by moving averages.
            copy_to_towers(trained_by(call.optimizer))

    def _apply_on_tower(
        self, call: ApplyCall, sums: list[Any], tower: int = 0
    ) -> None:
        """Apply sums on a tower, as on one device."""
        variables = [copy_on_tower(v, tower) for v in call.variables]

        def apply(grads: list[Any]) -> None:
            with as_one_device(call.optimizer, call.variables, tower):
                call.original(grads, variables)

        first, *_ = self.config.devices
        is_here = all(same_device(native(v).device, first) for v in variables)
        if call.apply_compiled and is_here:
            call.apply_compiled(apply, [sums], {}, [first], self.order)
        else:
            apply(sums)

    @property
    def _sum_of_step(self) -> RankSum | None:
        """What sums this rank's gradients over the ranks, in each step."""
        return self.rank_sum if self.local_sgd is None else None

    def _sums(self, call: ApplyCall, tower_grads: Gradients) -> list[list[Any]]:
        """Return K lists of N sums; None for a missing gradient."""
        rows, complete = self._reduced(call, tower_grads, self._reduce)
        return [complete(row) for row in rows]

    def _reduced(
        self,
        call: ApplyCall,
        tower_grads: Gradients,
        reduce: Callable[[Gradients, Sequence[Any]], list[list[Gradient]]],
    ) -> tuple[list[list[Any]], Callable[[Sequence[Any]], list[Any]]]:
        """Reduce the gradients that towers have parts of.

        Args:
            call: the call of the optimizer, with the gradients that all towers
                share.
            tower_grads: K lists of N summands.
            reduce: reduces K lists of M gradients, given their M variables.

        Returns:
            K lists of what the reduction returns, and a function that adds the
            shared gradients to M sums.
        """
        present = [grad is not None for grad in tower_grads[0]]
        trained = list(itertools.compress(call.variables, present))
        order = self.order if self.local_sgd is None else self.local_sgd.order
        of_towers = dataclasses.replace(call, grads=list(tower_grads[0]))
        over_ranks = self._sum_of_step

        def reduce_all(grads: Gradients) -> list[list[Gradient]]:
            rows = reduce(grads, trained)
            if over_ranks is None:
                return rows
            sums = over_ranks.sum(call.optimizer, trained, rows[0])
            return [sums for _ in rows]

        rows = order.reduce(
            of_towers.describe_gradients(),
            [[g for g in grads if g is not None] for grads in tower_grads],
            reduce_all,
        )

        def complete(sums: Sequence[Any]) -> list[Any]:
            left = iter(sums)
            return [
                next(left) if is_present else shared
                for is_present, shared in zip(present, call.grads, strict=True)
            ]

        return rows, complete

    def _reduce(
        self, tower_grads: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        if self._reduction is not None:
            return self._reduction(tower_grads, self.config.devices)
        targets = [copy_on_tower(native(v)).device for v in variables]
        sums = sum_at_variables(tower_grads, self.config.devices, targets)
        return [sums for _ in self.config.devices]


class UpdateEach(WeightUpdate):
    """Every tower applies the same sums to its own copy of the weights."""

    # Without shared memory this can be cheaper than copying the weights.
    name = "each"
    description = "every tower updates its own weights"
    mirrors = True

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Give each tower its own copies of the slot variables and weights."""
        # Weights that a step creates are not placed yet.
        for variable in (*trained_by(optimizer), *optimizer.variables):
            self.variables.place(variable)

    def _apply_update(self, call: ApplyCall, tower_grads: Gradients) -> None:
        if call.apply_compiled:
            self._apply_compiled(call, tower_grads, call.apply_compiled)
            return
        for tower, sums in enumerate(self._sums(call, tower_grads)):
            marks.reached(tower, "reduced", sums)
            with marks.until(tower, "updated"):
                self._apply_on_tower(call, sums, tower)

    def _apply_compiled(
        self,
        call: ApplyCall,
        tower_grads: Gradients,
        apply_compiled: Callable[..., None],
    ) -> None:
        """Sum gradients, and update each tower's weights by one function."""
        variables = [copy_on_tower(v, 0) for v in call.variables]
        devices, reduction = self.config.devices, self._reduction
        unpack: Callable[[Sequence[Any]], list[Any]] = list

        def reduce(
            grads: Gradients, trained: Sequence[Any]
        ) -> list[list[Gradient]]:
            nonlocal unpack
            sums_over_ranks = self._sum_of_step is not None
            if sums_over_ranks or not isinstance(reduction, PackedReduction):
                return self._reduce(grads, trained)
            # The function unpacks them, without a copy.
            rows, unpack = reduction.reduce_packed(grads, devices)
            return rows

        rows, complete = self._reduced(call, tower_grads, reduce)

        def apply(row: list[Any]) -> None:
            with as_one_device(call.optimizer, call.variables, 0):
                call.original(complete(unpack(row)), variables)

        with contextlib.ExitStack() as stack:
            for tower, row in enumerate(rows):
                marks.reached(tower, "reduced", row)
                stack.enter_context(marks.until(tower, "updated"))
            apply_compiled(
                apply, rows, self.variables.handles(), devices, self.order
            )


class UpdateAtVariable(WeightUpdate):
    """Every trained weight exists once; gradients are summed on its device.

    ``device_for`` returns the device to hold a given weight.
    """

    name = "at_variable"
    description = "trained weights exist once and are updated in place"
    mirrors = False

    def __init__(
        self, config: TowerConfig, device_for: Callable[[keras.Variable], str]
    ):
        super().__init__(config)
        self._device_for = device_for

    def place(self, variable: keras.Variable) -> bool:
        """Move a weight to its device; return whether it moved."""
        if variable in self.variables.moved:
            return False
        moved = self.variables.hold_once(variable)
        if not variable.trainable:
            return moved
        self.variables.move(variable, self._device_for(variable))
        return True

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put an optimizer's slots beside their weights."""
        super().place_optimizer(optimizer)
        if optimizer.built:
            moved = self.variables.moved
            for slot, weight in slots_of(optimizer):
                if weight in moved and slot not in moved:
                    self.variables.move(slot, weight._value.device)
