"""Weights in shards: every tower has its rows of each large weight.

Ports the third stage of ZeRO, or FSDP, and is no update of its own: Keras's
``apply`` is traced with the step, and the layout divides it. A slot has the
rows of its weight, and a gradient is added up where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.model_state import optimizers_in, slots_of
from keras_towers.fit.weights.placement import byte_size
from keras_towers.fit.weights.shards import ShardedVariable, axis_to_divide
from keras_towers.fit.weights.tower_variables import copy_on_tower, native
from keras_towers.partition.layouts import InShards
from keras_towers.reduction import scaled


class UpdateInShards(WeightUpdate):
    """Every tower updates its own rows of weights, and of their slots."""

    name = "in_shards"
    description = "every tower has its rows of large weights, and updates them"
    is_traced = True

    def __init__(self, config: TowerConfig):
        if config.options.updates == "each":
            # Small weights, and what a tower computes, are on its device.
            self.mirrors = True
        super().__init__(config)
        # What each variable in shards is.
        self._divided: IdentityDict[keras.Variable, str] = IdentityDict()
        self._held_before: dict[str, list[int]] = {}

    def place(self, variable: keras.Variable) -> bool:
        """Divide a large variable; return whether it moved."""
        if layout_of(variable) is not None:
            return False
        value = copy_on_tower(variable._value, 0)
        towers = self.config.num_towers
        axis = axis_to_divide(value.shape, value.dtype.size, towers)
        if axis is None:
            return super().place(variable)
        self._divide(variable, axis)
        self._divided[variable] = "weights"
        return True

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer, and divide each slot before the next is made."""
        with contextlib.ExitStack() as stack:
            for part in optimizers_in(optimizer):
                divided = {"add_variable_from_reference": self._add_slot}
                shadows = patches.bind_to(part, divided)
                stack.enter_context(patches.shadowed(part, shadows))
            super().make_ready(optimizer, variables)

    def _add_slot(
        self,
        optimizer: Any,
        original: Callable[..., keras.Variable],
        reference_variable: Any,
        *args: Any,
        **kwargs: Any,
    ) -> keras.Variable:
        slot = original(reference_variable, *args, **kwargs)
        self._divide_slot(slot, reference_variable)
        return slot

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Give slots the rows of their weights."""
        for part in optimizers_in(optimizer):
            for slot, weight in slots_of(part) if part.built else ():
                self._divide_slot(slot, weight)
        for variable in optimizer.variables:
            if layout_of(variable) is None:
                self.variables.place(variable)

    def _divide_slot(self, slot: keras.Variable, weight: Any) -> None:
        """Divide a slot as its weight, if each entry belongs to one of it."""
        layout = layout_of(weight)
        is_like = tuple(slot.shape) == tuple(weight.shape)
        if layout is not None and is_like and layout_of(slot) is None:
            self._divide(slot, layout.axis, beside=weight)
            self._divided[slot] = "optimizer state"

    def _divide(
        self, variable: keras.Variable, axis: int, beside: Any = None
    ) -> None:
        self.variables.hold_once(variable)
        self.variables.divide(variable, axis, beside)

    def release(self) -> None:
        """Put all variables back that are not restored yet."""
        self._held_before = self.held_bytes()
        super().release()
        for variable in [*self._divided]:
            del self._divided[variable]

    def held_bytes(self) -> dict[str, list[int]]:
        """Return the bytes of each tower's rows of weights, and of slots."""
        sizes: dict[str, list[int]] = {}
        for variable, what in self._divided.items():
            if layout_of(variable) is None:
                continue
            own = [byte_size(shard) for shard in variable._value.shards]
            before = sizes.get(what, [0] * len(own))
            sizes[what] = [a + b for a, b in zip(before, own, strict=True)]
        return sizes or self._held_before

    def apply_in_trace(self, call: UpdateCall) -> dict[str, InShards]:
        """Trace an update; return how its gradients are laid out.

        Returns:
            The layouts, by the names of the operations that return the
            gradients.
        """
        layouts: dict[str, InShards] = {}
        grads: list[Any] = []
        factor = self.config.gradient_factor
        for gradient, weight in zip(
            scaled(call.grads, factor), call.variables, strict=True
        ):
            layout = layout_of(weight)
            if layout is not None and isinstance(gradient, tf.Tensor):
                (gradient,) = tf.raw_ops.IdentityN(
                    input=[gradient], name="gradient"
                )
                layouts[gradient.op.name] = layout
            grads.append(gradient)
        with as_one_device(call.optimizer, call.variables, 0):
            variables = [copy_on_tower(v, 0) for v in call.variables]
            call.original(grads, variables)
        return layouts


def layout_of(variable: Any) -> InShards | None:
    """Return how a variable of Keras or TensorFlow is divided, or None."""
    value = native(variable)
    return value.layout if isinstance(value, ShardedVariable) else None
