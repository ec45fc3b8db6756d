"""Where weights live, and how optimizers update them.

Keras's own ``apply`` runs on sums of the towers' gradients, exactly as on one
device. It is traced with a step of ``fit``, whose exchanges add gradients up.
In a custom loop, ``Optimizer.apply`` inside ``strategy.run`` passes them to
``reduce_and_apply``. Clipping, accumulation, loss scaling, weight decay, moving
averages and constraints thus see the gradient of the global batch without
special handling.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers._incomplete import name_of
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit.contract import (
    ApplyCall,
    TowerConfig,
    check_equal_gradients,
)
from keras_towers.fit.step_agreement import ComparedStep
from keras_towers.fit.step_order import StepOrder
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights.copies import (
    copy_on_tower,
    copy_to_towers,
    native,
)
from keras_towers.fit.weights.least_loaded import Placement
from keras_towers.fit.weights.model_state import (
    build_optimizer,
    slots_of,
    trained_by,
)
from keras_towers.fit.weights.tower_variables import TowerVariables
from keras_towers.partition.layouts import (
    MIRRORED,
    REPLICATED,
    GradientLayout,
)
from keras_towers.reduction import (
    Collectives,
    Gradients,
    OnDevice,
    OnTowers,
    RankSum,
    scaled,
)

if TYPE_CHECKING:
    from keras_towers.fit.update.local_sgd import LocalSGD


class WeightUpdate:
    """Where trained weights and slot variables live, and who updates them.

    By default tower 0 has the slot variables, updates the weights, and copies
    them to the other towers.

    Args:
        config: the towers.
        collectives: what exchanges tensors among towers; None: as without
            NCCL.
        each: whether every tower has, and updates, weights and slots.
        device_for: returns the only device of a weight and its slots, where
            its gradient is summed, too; None: the towers have them.
        gradients: sums gradients; None: ``collectives`` does.
        local_sgd: lets ranks update their weights independently, and adds
            changes up at the end of a round.
        rank_sum: adds this rank's sums up over the ranks.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        description: a short phrase for ``describe()``.
        mirrors: whether each tower has a copy of the weights; None: unless all
            towers are on the host.
        pushes: whether gradients are results of a step, which ``push`` gets.
        divides_slots: whether towers update rows of slots.
    """

    name: str = "once"
    description: str = "weights are updated on tower 0"
    mirrors: bool | None = None
    pushes = False
    divides_slots = False

    def __init__(
        self,
        config: TowerConfig,
        collectives: Collectives | None = None,
        each: bool = False,
        device_for: Placement | None = None,
        gradients: Collectives | None = None,
        local_sgd: LocalSGD | None = None,
        rank_sum: RankSum | None = None,
    ):
        self.config = config
        on_host = devices.all_on_host(config.devices)
        mirrors = self.mirrors
        if mirrors is None:
            mirrors = device_for is None and (each or not on_host)
        self.variables: TowerVariables = TowerVariables(config, mirrors)
        self.order: StepOrder = StepOrder(config.transport)
        self.local_sgd = local_sgd
        self.rank_sum = rank_sum
        if collectives is None:
            collectives = OnDevice() if on_host else OnTowers()
        self.collectives: Collectives = collectives
        self._gradients = gradients or collectives
        self._device_for, self._each = device_for, each
        if self.name != WeightUpdate.name:
            return
        if each:
            self.name = "each"
            self.description = "every tower updates its own weights"
        elif device_for is not None:
            self.name = "at_variable"
            self.description = (
                "trained weights exist once and are updated in place"
            )
        elif self.variables.mirrors:
            self.description += " and copied to the other towers"

    @property
    def updates_each(self) -> bool:
        """Whether every tower updates its own copies of weights and slots."""
        return self._each and self.variables.mirrors

    @property
    def keeps_devices(self) -> bool:
        """Whether updates run where the weights are."""
        return self._device_for is not None

    def place(self, variable: keras.Variable) -> bool:
        """Place a weight as the update requires; return whether it moved."""
        if self._device_for is None:
            return self.variables.place(variable)
        if variable in self.variables.moved:
            return False
        moved = self.variables.hold_once(variable)
        if not variable.trainable:
            return moved
        self.variables.move(variable, self._chosen_device(variable))
        return True

    def _chosen_device(self, variable: keras.Variable) -> str:
        """Return the device that the placement chooses, if there is one."""
        place = self._device_for
        assert place is not None
        chosen = place(variable)
        known = [d.name for d in tf.config.list_logical_devices()]
        if not isinstance(chosen, str) or not any(
            devices.same_device(chosen, name) for name in known
        ):
            raise TowerError(
                f"the placement {name_of(place)} puts {variable.path} on "
                f"{chosen!r}: it has to return one of {', '.join(known)}."
            )
        return chosen

    def place_created(self, variable: keras.Variable) -> None:
        """Place a weight that was created in the block, maybe of no model."""
        self.variables.place(variable)

    def divides(self, variable: keras.Variable) -> bool:
        """Whether to divide a weight that is about to be created."""
        return False

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Place an optimizer's slot variables, once or beside their weights."""
        if self._each:
            # Weights that a step creates are not placed yet.
            for variable in (*trained_by(optimizer), *optimizer.variables):
                self.variables.place(variable)
            return
        for variable in optimizer.variables:
            self.variables.hold_once(variable)
        moved = self.variables.moved
        if self._device_for is not None and optimizer.built:
            for slot, weight in slots_of(optimizer):
                if weight in moved and slot not in moved:
                    self.variables.move(slot, weight._value.device)

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

    def gradient_layout(
        self, gradient: Any, weight: Any
    ) -> GradientLayout | None:
        """Return how an optimizer gets a gradient in a step.

        None: as it is computed, since rules know how to divide its use.
        """
        return GradientLayout(MIRRORED if self.updates_each else REPLICATED)

    def apply_in_trace(self, call: ApplyCall) -> None:
        """Trace an update with the step."""
        with as_one_device(call.optimizer, call.variables):
            variables = [copy_on_tower(v) for v in call.variables]
            call.original(call.grads, variables)

    def push(self, call: ApplyCall) -> None:
        """Pass gradients on that are results of a step."""
        raise NotImplementedError

    def apply_outside(self, call: ApplyCall) -> None:
        """Update outside of steps and replicas, as one device does."""
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
            sums = self.sum_over_ranks(call.optimizer, weights, rows[0])
            return [sums for _ in rows]

        rows = self.order.reduce(
            call.describe_gradients(),
            [[g for g in grads if g is not None] for grads in tower_grads],
            reduce,
        )
        for tower, row in enumerate(rows if self.updates_each else rows[:1]):
            left = iter(row)
            sums = [next(left) if is_there else None for is_there in present]
            self._apply_on_tower(call, sums, tower)
        if not self.updates_each:
            # The optimizer may overwrite all its weights by moving averages.
            copy_to_towers(trained_by(call.optimizer))

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

    def _apply_on_tower(
        self, call: ApplyCall, sums: list[Any], tower: int = 0
    ) -> None:
        """Apply sums on a tower, as on one device."""
        variables = [copy_on_tower(v, tower) for v in call.variables]
        with as_one_device(call.optimizer, call.variables, tower):
            call.original(sums, variables)

    def collectives_for(self, weight: Any) -> Collectives:
        """Return what sums the gradients of a weight over towers."""
        if self._device_for is None:
            return self._gradients
        return OnDevice(copy_on_tower(native(weight)).device)

    def _sum_over_towers(
        self, tower_grads: Gradients, weights: Sequence[Any]
    ) -> list[list[Any]]:
        """Return K lists of N sums, given K lists of N gradients."""
        names = self.config.devices
        if self._device_for is None:
            return self._gradients.all_reduce(tower_grads, names)
        sums = [
            self.collectives_for(weight).all_reduce(
                [[gradient] for gradient in of_towers], names
            )
            for weight, *of_towers in zip(weights, *tower_grads, strict=True)
        ]
        return [[total[k][0] for total in sums] for k, _ in enumerate(names)]

    def sum_over_ranks(
        self, optimizer: Any, weights: Sequence[Any], grads: Sequence[Any]
    ) -> list[Any]:
        """Return N sums, given this rank's N gradients for an optimizer."""
        assert self.rank_sum is not None
        return self.rank_sum.sum(optimizer, weights, grads)
