"""Weights, or only their slots, in shards: every tower has its rows of them.

Ports the first stage of ZeRO, and the third, which is also FSDP (Rajbhandari et
al., "ZeRO: memory optimizations toward training trillion parameter models", SC
2020). Keras's ``apply`` is traced with the step, and the layout divides it. A
slot has the rows of its weight, and a gradient is added up where they are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import announce, first_time
from keras_towers.errors import TowerError
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import ApplyCall, TowerConfig
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.copies import copy_on_tower, native
from keras_towers.fit.weights.deferred_variable import CONSTANT
from keras_towers.fit.weights.model_state import optimizers_in, slots_of
from keras_towers.fit.weights.shards import (
    SMALLEST_BYTES,
    ShardedVariable,
    choose_layout,
)
from keras_towers.partition.layouts import GradientLayout, MeshLayout
from keras_towers.reduction import Collectives
from keras_towers.rendezvous import rank_checks

logger: logging.Logger = logging.getLogger("keras_towers")


class UpdateInShards(WeightUpdate):
    """Every tower updates its own rows of weights, and of their slots.

    Without ``divides_weights`` only slots are in shards, as in stage 1 of ZeRO:
    each tower computes its rows of a new weight, and all towers gather them.

    Args:
        config: the towers.
        divides_weights: whether weights are in shards, not only their slots.
        collectives: as in ``WeightUpdate``.
        layout_of: returns how a variable of Keras is divided, given its shape,
            too; None: large ones are, over towers.
        **sums: what sums over ranks, as in ``WeightUpdate``.
    """

    name = "sharded"
    option = 'weights="sharded"'
    description = "every tower updates its share of the weights"
    divides_slots = True

    def __init__(
        self,
        config: TowerConfig,
        divides_weights: bool,
        collectives: Collectives,
        layout_of: Callable[[Any, Sequence[int]], MeshLayout | None]
        | None = None,
        **sums: Any,
    ):
        # Small weights, and what a tower computes, are on its device.
        each = config.options.updates == "each"
        super().__init__(config, collectives, each, **sums)
        self._divides_weights = divides_weights
        if not divides_weights:
            self.option = 'updates="sharded"'
        self._choose_layout = layout_of
        if layout_of is not None:
            self.description = "the layout map divides weights over the mesh"
        elif divides_weights:
            least = f"{SMALLEST_BYTES // 1024} KiB"
            self.description += f", and has only its rows of those from {least}"
        # The variables in shards, and the places of those that ranks know.
        self._divided: IdentityDict[keras.Variable, None] = IdentityDict()
        self._places: IdentityDict[Any, str] = IdentityDict()
        self._agreements = 0

    @property
    def updates_each(self) -> bool:
        """Whether every tower updates its own copies of small weights."""
        return self.variables.mirrors

    @property
    def divides_over_ranks(self) -> bool:
        """Whether each rank has rows of variables in shards."""
        return self.config.shards.size > 1

    def name_places(self, weights: Sequence[Any], number: int) -> None:
        """Name weights by their places in the model.

        Only then are they divided over ranks, which have agreed on their
        values.

        Args:
            weights: the weights, in the order of the model.
            number: the number of this agreement of the ranks.
        """
        self._agreements = number
        for index, weight in enumerate(weights):
            self._places.setdefault(weight, f"{number}.{index}")

    def name_created(self, weight: Any) -> None:
        """Name a weight that all ranks create in a step, with one value."""
        if self.divides_over_ranks:
            path = rank_checks.without_numbers(weight.path)
            self._places[weight] = self._numbered(f"{self._agreements}: {path}")

    def name_slots(self, optimizers: Sequence[Any]) -> None:
        """Name slots whose values all ranks have agreed on."""
        for optimizer in optimizers:
            for slot, weight in slots_of(optimizer) if optimizer.built else ():
                if slot not in self._places and weight in self._places:
                    self._places[slot] = self._place_of_slot(slot, weight)

    def _may_divide(self, variable: Any) -> bool:
        return not self.divides_over_ranks or variable in self._places

    def place(self, variable: keras.Variable) -> bool:
        """Divide a large variable; return whether it moved."""
        if variable in self._divided:
            return False
        layout = self._layout_of(variable)
        divides = self._divides_weights and self._may_divide(variable)
        if layout is None or not divides:
            return super().place(variable)
        self._take_over(variable)
        self._divide(variable, layout)
        return True

    def _divide(
        self,
        variable: keras.Variable,
        layout: MeshLayout,
        back_to: str | None = None,
    ) -> None:
        place = self._places.get(variable, "")
        self.variables.divide(variable, layout, place, back_to)
        self._divided[variable] = None

    def place_created(self, variable: keras.Variable) -> None:
        """Divide a weight, unless ranks have yet to agree on its value."""
        if self.config.transport.size == 1 or self._layout_of(variable) is None:
            self.place(variable)

    def divides(self, variable: keras.Variable) -> bool:
        """Whether to divide a weight that is about to be created."""
        shape, dtype = variable._shape, tf.as_dtype(variable.dtype)
        if shape is None or not variable.trainable or not self._divides_weights:
            return False
        if self._choose_layout is not None:
            return self._choose_layout(variable, shape) is not None
        return choose_layout(shape, dtype.size, self._all_towers) is not None

    @property
    def _all_towers(self) -> int:
        return self.config.num_towers * self.config.shards.size

    def _take_over(self, variable: keras.Variable) -> None:
        """Make a variable ordinary that another block has left in shards."""
        value = variable._value
        if isinstance(value, ShardedVariable) and not value.become_ordinary():
            with tf.init_scope(), compat.single_device_mode():
                variable._value = tf.Variable(value)

    def _layout_of(self, variable: Any) -> MeshLayout | None:
        """Return how a weight and its slots are divided; None: they are not."""
        value: Any = copy_on_tower(native(variable))
        if isinstance(value, ShardedVariable) and variable in self._divided:
            return value.layout
        if type(value) is compat.UninitializedVariable:
            # The functions of a loaded model have its handle.
            return None
        if self._choose_layout is not None:
            if not isinstance(variable, keras.Variable):
                return None
            return self._choose_layout(variable, value.shape.as_list())
        shape, item_bytes = value.shape.as_list(), value.dtype.size
        return choose_layout(shape, item_bytes, self._all_towers)

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer, and make each slot in parts if that is known."""
        with contextlib.ExitStack() as stack:
            for part in optimizers_in(optimizer):
                divided = {"add_variable_from_reference": self._add_slot}
                shadows = patches.bind_to(part, divided)
                stack.enter_context(patches.shadowed(part, shadows))
            super().make_ready(optimizer, variables)
        self._say_if_whole(optimizer, variables)

    def _say_if_whole(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Announce once that nothing is in shards, though the user asks it."""
        if self._choose_layout is not None or self._all_towers == 1:
            return
        if any(self._layout_of(variable) is not None for variable in variables):
            return
        is_first = first_time(optimizer, "nothing in shards")
        if is_first and self.config.transport.rank == 0:
            announce(
                f"{self.option} divides nothing here: none of "
                f"{len(variables)} weights has at least "
                f"{SMALLEST_BYTES // 1024} KiB, and an axis with a row for "
                f"each of {self._all_towers} towers. Every tower has all "
                "weights whole."
            )

    def _add_slot(
        self,
        optimizer: Any,
        original: Callable[..., keras.Variable],
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
        **kwargs: Any,
    ) -> keras.Variable:
        """Create a slot; one that is the same everywhere is made in parts."""
        weight, layout = reference_variable, self._layout_of(reference_variable)
        constant = keras.initializers.get(initializer)
        is_known = isinstance(constant, CONSTANT) and self._may_divide(weight)
        make = functools.partial(
            original, weight, name=name, initializer=initializer, **kwargs
        )
        if layout is None or not is_known:
            return make()

        def initialize(
            original: Callable[..., None], variable: Any, value: Any
        ) -> None:
            place = self._place_of_slot(variable, weight)
            if place:
                self._places[variable] = place
            original(
                variable,
                self.variables.create_divided(
                    variable, constant, layout, place, weight
                ),
            )
            self._divided[variable] = None

        replaced = compat.KerasVariable, "_initialize", initialize
        with patches.replaced(replaced):
            return make()

    def _place_of_slot(self, slot: Any, weight: Any) -> str:
        """Name a slot that all ranks make alike, by its weight."""
        if not self.divides_over_ranks:
            return ""
        path = rank_checks.without_numbers(slot.path)
        place = f"{self._agreements}: {path} of {self._places[weight]}"
        return self._numbered(place)

    def _numbered(self, place: str) -> str:
        """Tell a place from equal ones, which ranks name in the same order."""
        others = sum(
            other.startswith(f"{place} (") for other in self._places.values()
        )
        return f"{place} ({others})"

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Give slots the rows of their weights."""
        for part in optimizers_in(optimizer):
            for slot, weight in slots_of(part) if part.built else ():
                self._divide_slot(slot, weight)
        for variable in optimizer.variables:
            if variable not in self._divided:
                self.variables.place(variable)

    def _divide_slot(self, slot: keras.Variable, weight: Any) -> None:
        """Divide a slot as its weight, if each entry belongs to one of it."""
        layout = self._layout_of(weight)
        is_like = tuple(slot.shape) == tuple(weight.shape)
        if layout is None or not is_like or slot in self._divided:
            return
        if self._may_divide(slot):
            self._take_over(slot)
            self._divide(slot, layout, self.variables.home_of(weight))

    def restore(self, variable: keras.Variable) -> None:
        """Put a variable back where it was before."""
        super().restore(variable)
        self._divided.pop(variable, None)
        self._places.pop(variable, None)

    def release(self) -> None:
        """Put all variables back that are not restored yet."""
        lost = [] if self.variables.asks_ranks else self._remote()
        super().release()
        for known in (self._divided, self._places):
            for variable in [*known]:
                del known[variable]
        if lost:
            logger.warning(
                "training failed while each rank had only its part of %d "
                "variables. They have no value now: load the model from a "
                "checkpoint",
                len(lost),
            )

    def _remote(self) -> list[ShardedVariable]:
        """The variables of which each rank has rows."""
        values = [variable._value for variable in self._divided]
        return [
            value
            for value in values
            if isinstance(value, ShardedVariable) and value.is_remote
        ]

    def apply_in_replica(self, call: ApplyCall) -> None:
        """Sum gradients over all towers, and divide the update."""
        if self.config.shards.size > 1:
            raise TowerError(
                f"{self.option} over all processes works only with fit() and "
                'train_on_batch(): add shard_over="process" in a custom '
                f"training loop, or leave {self.option.partition('=')[0]} out."
            )
        super().apply_in_replica(call)

    def gradient_layout(
        self, gradient: Any, weight: Any
    ) -> GradientLayout | None:
        """Return how an optimizer gets a gradient in a step.

        None: as it is computed, since rules know how to divide its use.
        """
        whole = super().gradient_layout(gradient, weight)
        layout = self._layout_of(weight)
        if layout is None or whole is None:
            return whole
        if isinstance(gradient, tf.IndexedSlices):
            return None
        return GradientLayout(layout.towers or whole.towers, layout.columns)
