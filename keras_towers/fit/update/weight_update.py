"""Updates of weights: places weights and slots, and applies gradients.

Keras's own ``apply`` runs on sums of the towers' gradients, exactly as on one
device. It is traced with a step of ``fit``, whose exchanges sum the gradients.
In a custom loop, ``Optimizer.apply`` inside ``strategy.run`` passes them to
``reduce_and_apply``. So clipping by the global norm, accumulation, loss
scaling, weight decay, moving averages and constraints get the gradient of the
global batch, and need no code here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers.fit.components import (
    ApplyCall,
    TowerConfig,
    check_equal_gradients,
)
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.update.sharding_policy import ShardingPolicy
from keras_towers.fit.weights.copies import (
    copy_on_tower,
    copy_to_towers,
    native,
)
from keras_towers.fit.weights.model_state import (
    build_optimizer,
    optimizers_in,
    slots_of,
    trained_by,
)
from keras_towers.fit.weights.tower_variables import (
    ON_EACH,
    ONCE,
    TowerVariables,
)
from keras_towers.fit.weights.without_memory import (
    deferring_constants,
    is_deferred,
)
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.partition.ir.layouts import MIRRORED, MeshLayout
from keras_towers.reduction.collectives import Collectives, OnDevice, OnTowers
from keras_towers.reduction.gradients import Gradients, scaled
from keras_towers.reduction.rank_sum import RankSum
from keras_towers.transport import devices

if TYPE_CHECKING:
    from keras_towers.fit.update.local_sgd import LocalSGD


class WeightUpdate:
    """Places trained weights and slot variables, and applies gradients to them.

    An optimizer's ``apply`` comes here: ``apply_in_trace`` within a step of
    Keras, ``apply_in_replica`` within ``strategy.run``, and ``apply_outside``
    anywhere else.

    Args:
        config: the towers.
        sharding: decides where weights and slots are; None: on tower 0.
        collectives: exchange tensors among towers; None: those without NCCL.
        gradients: sums gradients; None: ``collectives`` does.
        local_sgd: lets ranks update their weights independently, and averages
            their changes at the end of a round.
        rank_sum: sums gradients over ranks.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        description: a short phrase for ``describe()``.
        sharding: decides where weights and slots are.
        pushes: whether gradients are results of a step, which ``push`` gets.
    """

    name: str = ""
    description: str = ""
    pushes = False

    def __init__(
        self,
        config: TowerConfig,
        sharding: ShardingPolicy | None = None,
        collectives: Collectives | None = None,
        gradients: Collectives | None = None,
        local_sgd: LocalSGD | None = None,
        rank_sum: RankSum | None = None,
    ):
        self.config = config
        self.sharding: ShardingPolicy = sharding or ShardingPolicy(config)
        self.name = self.name or self.sharding.name
        self.description = self.description or self.sharding.description
        self.variables: TowerVariables = TowerVariables(
            config, self.sharding.mirrors
        )
        self.order: StepOrder = StepOrder(config.transport)
        self.local_sgd = local_sgd
        self.rank_sum = rank_sum
        if collectives is None:
            on_host = devices.all_on_host(config.devices)
            collectives = OnDevice() if on_host else OnTowers()
        self.collectives: Collectives = collectives
        self._gradients = gradients or collectives

    def divide(
        self,
        sharding: ShardingPolicy,
        collectives: Collectives,
        gradients: Collectives | None,
    ) -> None:
        """Divide variables from now on; those that are there move later.

        Args:
            sharding: decides where weights and slots are.
            collectives: exchange tensors among towers.
            gradients: sums gradients; None: ``collectives`` does.
        """
        self.sharding, self.name = sharding, sharding.name
        self.description = sharding.description
        self.collectives = collectives
        self._gradients = gradients or collectives

    def place(self, variable: keras.Variable) -> bool:
        """Place a weight as the update requires; return whether it moved."""
        variables = self.variables
        # A placement may count what it is asked for.
        if variables.home_of(variable).is_final:
            return False
        if self.sharding.keeps_devices and variable.trainable:
            device = self.sharding.device_of(variable)
            return variables.place(variable, device=device)
        layout = self._layout_of(variable)
        divides = self.sharding.divides_weights and layout.divides
        if not divides or not variables.may_divide(variable):
            layout = ON_EACH if variables.mirrors else ONCE
        return variables.place(variable, layout)

    def _layout_of(self, variable: Any) -> MeshLayout:
        """Return the layout of a weight's slots and of its gradient.

        If weights are divided, it is the layout of the weight, too.
        """
        now = self.variables.home_of(variable).layout
        layout = now if now.divides else self.sharding.of(variable)
        if layout.rows is not None or not self.sharding.updates_each:
            return layout
        return dataclasses.replace(layout, towers=MIRRORED)

    def place_created(self, variable: keras.Variable) -> None:
        """Place a weight that was created in the block, maybe of no model.

        A model that has it gives it a device. It is divided once ranks have
        agreed on its value.
        """
        alone = self.config.transport.size == 1
        if self.sharding.keeps_devices:
            self.variables.hold_once(variable)
        elif alone or not self._layout_of(variable).divides:
            self.place(variable)

    def place_optimizer(
        self, optimizer: keras.optimizers.Optimizer
    ) -> list[keras.Variable]:
        """Place an optimizer's slot variables, once or beside their weights.

        Returns:
            Those that moved, of which functions may still use another value.
        """
        moved = self._place_slots(optimizer)
        # Weights that a step creates are not placed yet.
        weights = trained_by(optimizer) if self.sharding.each else []
        layout = ON_EACH if self.sharding.updates_each else ONCE
        placed = (*weights, *optimizer.variables)
        return moved + [v for v in placed if self.variables.place(v, layout)]

    def _place_slots(
        self, optimizer: keras.optimizers.Optimizer
    ) -> list[keras.Variable]:
        """Place slot variables beside their weights; return those moved."""
        return [
            slot
            for part in optimizers_in(optimizer)
            if part.built
            for slot, weight in slots_of(part)
            if self._place_slot(slot, weight)
        ]

    def _place_slot(self, slot: keras.Variable, weight: Any) -> bool:
        """Move a slot to its weight; divide one of the weight's shape alike."""
        variables, layout = self.variables, self._layout_of(weight)
        device = variables.home_of(weight).device
        has_entries = tuple(slot.shape) == tuple(weight.shape)
        if layout.divides and has_entries and is_deferred(slot):
            variables.name_slot(slot, weight)
        if device:
            return variables.place(slot, device=device)
        if layout.divides and has_entries and variables.may_divide(slot):
            back_to = variables.original_device(weight)
            return variables.place(slot, layout, back_to=back_to)
        return False

    def note_own_step(self, step: ComparedStep) -> None:
        """Record a step of training that this rank takes by itself."""

    def end_rounds(self) -> None:
        """Average the weights that ranks updated independently. Collective."""
        if self.local_sgd is not None:
            self.local_sgd.end_rounds(self.order)

    def release(self, asks_ranks: bool = True) -> None:
        """Put all variables back where they were."""
        if self.local_sgd is not None:
            self.local_sgd.discard_rounds()
        self.variables.restore_all(asks_ranks)

    def apply_in_replica(self, call: ApplyCall) -> None:
        """Sum the gradients over all replicas, then update once."""
        if self.sharding.divides_over_ranks:
            option = self.sharding.option
            advice = self.sharding.to_stay_whole
            if self.sharding.is_given:
                advice = f'add shard_over="process" or {advice}'
            raise TowerError(
                f"{option} over all processes works only with fit() and "
                f"train_on_batch(): {advice} in a custom training loop."
            )
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

    def gradient_layout(self, gradient: Any, weight: Any) -> MeshLayout | None:
        """Return the layout in which an optimizer gets a gradient in a step.

        None: as it is computed, since rules can divide its use.
        """
        layout = self._layout_of(weight)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return None if is_sparse and layout.divides else layout

    def apply_in_trace(self, call: ApplyCall) -> None:
        """Trace an update with the step."""
        self._apply_on_tower(call, call.grads)

    def push(self, call: ApplyCall) -> None:
        """Pass on gradients that are results of a step."""
        raise NotImplementedError

    def apply_outside(self, call: ApplyCall) -> None:
        """Apply gradients outside of steps and replicas, as on one device."""
        self._apply_on_tower(call, call.grads)
        optimizer = call.optimizer
        copy_to_towers([*trained_by(optimizer), *optimizer.variables])

    def reduce_and_apply(self, call: ApplyCall, tower_grads: Gradients) -> None:
        """Update weights, given the gradients of K replicas."""
        factor = self.config.gradient_factor
        tower_grads = [scaled(grads, factor) for grads in tower_grads]
        self.make_ready(call.optimizer, call.variables)
        present = [grad is not None for grad in call.grads]
        weights = list(itertools.compress(call.variables, present))

        def reduce(grads: Gradients) -> list[list[Any]]:
            rows = self._sum_over_towers(grads, weights)
            if self.rank_sum is None:
                return rows
            sums = self.rank_sum.sum(call.optimizer, weights, rows[0])
            return [sums for _ in rows]

        rows = self.order.reduce(
            call.describe_gradients(),
            [[g for g in grads if g is not None] for grads in tower_grads],
            reduce,
        )
        each = self.sharding.updates_each
        for tower, row in enumerate(rows if each else rows[:1]):
            left = iter(row)
            sums = [next(left) if is_there else None for is_there in present]
            self._apply_on_tower(call, sums, tower)
        if not each:
            # The optimizer may overwrite all its weights by moving averages.
            copy_to_towers(trained_by(call.optimizer))

    def make_ready(
        self, optimizer: Any, variables: Sequence[Any], in_apply: bool = True
    ) -> None:
        """Build the optimizer if needed, and place its slot variables.

        Args:
            optimizer: the optimizer.
            variables: the weights that it updates.
            in_apply: as for ``build_whole``.
        """
        before = len(optimizer.variables)
        # Slot variables outlive the graph being traced.
        with tf.init_scope():
            if not optimizer.built:
                with self._deferring_slots(variables):
                    self.build_whole(optimizer, variables, in_apply)
                with self.variables.placing_new():
                    self._place_slots(optimizer)
            self.place_optimizer(optimizer)
        if len(optimizer.variables) > before and not tf.executing_eagerly():
            compat.make_function_trace_again()
        if self.sharding.divide_any:
            divides = any(self._layout_of(v).divides for v in variables)
            self.sharding.announce(optimizer, variables, divides)

    def _deferring_slots(
        self, weights: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Create slots that begin as constants without memory in this block.

        They are divided before they take any.
        """
        divided = [w for w in weights if self._layout_of(w).divides]
        return deferring_constants({tuple(w.shape) for w in divided})

    def build_whole(
        self, optimizer: Any, variables: Sequence[Any], in_apply: bool = True
    ) -> None:
        """Build an optimizer with whole slots, as one device does.

        Args:
            optimizer: the optimizer.
            variables: the weights that it updates.
            in_apply: whether its first ``apply`` builds it, which names slots.
        """
        with as_one_device(optimizer, variables):
            if in_apply:
                build_optimizer(optimizer, variables)
            else:
                optimizer.build(variables)

    def _apply_on_tower(
        self, call: ApplyCall, sums: list[Any], tower: int = 0
    ) -> None:
        """Apply sums on a tower, as on one device."""
        variables = [copy_on_tower(v, tower) for v in call.variables]
        fuses = not self.sharding.divide_any
        with as_one_device(call.optimizer, call.variables, tower, fuses):
            call.original(sums, variables)

    def collectives_for(self, weight: Any) -> Collectives:
        """Return the collectives that sum a weight's gradients over towers."""
        if not self.sharding.keeps_devices:
            return self._gradients
        return OnDevice(copy_on_tower(native(weight)).device)

    def _sum_over_towers(
        self, tower_grads: Gradients, weights: Sequence[Any]
    ) -> list[list[Any]]:
        """Return K lists of N sums, given K lists of N gradients."""
        names = self.config.devices
        if not self.sharding.keeps_devices:
            return self._gradients.all_reduce(tower_grads, names)
        sums = [
            self.collectives_for(weight).all_reduce(
                [[gradient] for gradient in of_towers], names
            )
            for weight, *of_towers in zip(weights, *tower_grads, strict=True)
        ]
        return [[total[k][0] for total in sums] for k, _ in enumerate(names)]
