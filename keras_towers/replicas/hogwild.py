"""Asynchronous updates of shared weights, as in Hogwild! (Recht et al., 2011).

All towers share one copy of weights, metrics, moving statistics and random
state. Additions to a variable are atomic. Assignments, such as the update of a
slot variable or of a moving average, may lose the write of another tower.
Updates that depend on the number of updates run under a lock.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_towers.fit.components import ApplyCall, TowerConfig
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.update.sharding_policy import ShardingPolicy
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Variable
from keras_towers.reduction.collectives import Collectives
from keras_towers.reduction.gradients import scaled
from keras_towers.replicas.named_resources import after_writes_of

_numbers = itertools.count()


class Forgets(Protocol):
    """Steps whose traces are dropped when the strategy is exited."""

    def forget(self) -> None: ...


class HogwildUpdate(WeightUpdate):
    """An update in which every tower applies its own gradients."""

    name = "concurrent"
    description = "every tower updates the shared weights independently"

    def __init__(
        self,
        config: TowerConfig,
        collectives: Collectives,
        scale: float = 1.0,
        after_update: Callable[
            [Sequence[Variable]], object
        ] = lambda variables: None,
    ):
        sharding = ShardingPolicy(config, mirrors=False)
        super().__init__(config, sharding, collectives)
        self._scale = scale
        self.after_update = after_update
        self._steps: weakref.WeakSet[Forgets] = weakref.WeakSet()
        # The locks of optimizers.
        self._turns: IdentityDict[keras.Optimizer, tf.CriticalSection] = (
            IdentityDict()
        )

    def forget_on_release(self, steps: Forgets) -> None:
        """Call ``steps.forget`` when the strategy is exited."""
        self._steps.add(steps)

    def release(self, asks_ranks: bool = True) -> None:
        """Undo every placement, and free the accumulators."""
        try:
            super().release(asks_ranks)
        finally:
            for steps in self._steps:
                steps.forget()

    def apply_in_trace(self, call: ApplyCall) -> None:
        """Trace an update with the step."""
        super().apply_in_trace(call)
        # A custom training loop does this itself.
        self.after_update(call.variables)

    def apply_on_tower(self, call: ApplyCall) -> None:
        """Update without waiting for the gradients of other towers."""
        optimizer, variables = call.optimizer, call.variables
        self.make_ready(optimizer, variables)
        grads = scaled(call.grads, self._scale)
        # Updates where the weights are, not on the tower's device.
        with as_one_device(optimizer, variables):
            if takes_turns(optimizer, variables):
                loss_scale = _scale_of_loss(optimizer)

                def update() -> None:
                    own_grads = grads
                    if loss_scale is not None:
                        # Another tower may have changed the scale since this
                        # one's loss was scaled.
                        change = optimizer.dynamic_scale / loss_scale
                        own_grads = scaled(grads, change)
                    call.original(own_grads, variables)

                self._turn(optimizer).execute(
                    lambda: after_writes_of(update),
                    exclusive_resource_access=False,
                )
            else:
                call.original(grads, variables)
        self.after_update(variables)

    def _turn(self, optimizer: keras.Optimizer) -> tf.CriticalSection:
        """Return the lock of an optimizer, shared by all towers."""
        if optimizer not in self._turns:
            with tf.init_scope(), tf.device(compat.HOST):
                # TensorFlow's default name is shared by all sections: a step
                # with two optimizers would deadlock.
                name = f"keras_towers/turns_{next(_numbers)}"
                section = tf.CriticalSection(shared_name=name)
                self._turns[optimizer] = section
        return self._turns[optimizer]


def takes_turns(
    optimizer: keras.Optimizer, variables: Sequence[Variable]
) -> bool:
    """Whether updates of an optimizer must not overlap.

    They must not if they depend on the number of previous updates, or read a
    weight and overwrite it.
    """
    return bool(
        optimizer.gradient_accumulation_steps
        or optimizer.use_ema
        or getattr(optimizer, "inner_optimizer", None) is not None
        or any(getattr(v, "constraint", None) for v in variables)
    )


def _scale_of_loss(optimizer: keras.Optimizer) -> tf.Tensor | None:
    """Return the loss scale that the traced step has read, if any."""
    variable = getattr(optimizer, "dynamic_scale", None)
    native = getattr(variable, "_value", None)
    if not isinstance(native, tf.Variable):
        return None
    handle = compat.get_default_graph().capture(native.handle)
    for operation in _uses_of(handle):
        if operation.type == "ReadVariableOp":
            return operation.outputs[0]
    return None


# Holds True where ``ATOMIC_ADDITIONS`` apply outside of towers, too.
adds_atomically: ThreadLocal[bool] = ThreadLocal()


def _add(
    name: str, original: patches.Original, variable: keras.Variable, value: Any
) -> object:
    """Add to a variable atomically, so that no concurrent write is lost."""
    if not _may_be_written_concurrently(variable):
        return original(variable, value)
    native = variable._value
    value = tf.cast(tf.convert_to_tensor(value), native.dtype)
    if value.shape != native.shape:
        value = tf.broadcast_to(value, native.shape)
    return getattr(native, name)(value)


# Make additions to Keras variables atomic. They patch the class, since a step
# may add to a variable that no model tracks.
ATOMIC_ADDITIONS: tuple[patches.Patch, ...] = tuple(
    (compat.KerasVariable, name, functools.partial(_add, name))
    for name in ("assign_add", "assign_sub")
)


def _may_be_written_concurrently(variable: Variable) -> bool:
    """Whether other towers may write a variable while this one does."""
    native, step = variable._value, thread_state.current_step()
    # A step with a graph is divided over towers.
    is_own_step = step is not None and step.graph is None
    return (
        (is_own_step or adds_atomically.get() is True)
        and isinstance(native, tf.Variable)
        and not isinstance(native, compat.DistributedVariable)
        and native.shape.is_fully_defined()
        and not compat.in_stateless_scope()
    )


def _assign(
    original: patches.Original, variable: Variable, value: object
) -> object:
    """Turn the assignment of ``variable + value`` into an atomic addition."""
    # As in metrics, counters and seed generators.
    if not tf.executing_eagerly() and _may_be_written_concurrently(variable):
        added = _added(variable._value, value)
        if added is not None:
            variable.assign_add(added)
            return value
    return original(variable, value)


def _added(variable: tf.Variable, value: Any) -> tf.Tensor | None:
    """Return the value that a sum adds to the variable, or None."""
    graph = compat.get_default_graph()
    here = isinstance(value, tf.Tensor) and value.graph is graph
    if not here or value.op.type != "AddV2":
        return None
    one, other = value.op.inputs
    handle = graph.capture(variable.handle)
    if _is_current(one, handle):
        return other
    return one if _is_current(other, handle) else None


def _is_current(value: tf.Tensor, handle: tf.Tensor) -> bool:
    """Whether a value was read after the last write to its variable."""
    for operation in reversed(_uses_of(handle)):
        if operation.type != "ReadVariableOp":
            return False
        if operation.name == value.op.name:
            return True
    return False


def _uses_of(handle: tf.Tensor) -> list[tf.Operation]:
    """Return the operations of a graph that use a variable, in their order."""
    return [
        operation
        for operation in handle.graph.get_operations()
        if handle.name in (tensor.name for tensor in operation.inputs)
    ]


# The distance between seeds of replicas: Keras counts up the second number.
_SEED_STRIDE = 1_000_003


def draws_of(replica: Callable[[], int | tf.Variable | None]) -> patches.Patch:
    """Make replicas with the same random state draw different numbers.

    Args:
        replica: returns the number of the replica that draws; None: it draws
            what others draw.
    """

    def next_seed(
        original: patches.Original,
        generator: keras.random.SeedGenerator,
        *args: Any,
        **kwargs: Any,
    ) -> tf.Tensor:
        seed, number = original(generator, *args, **kwargs), replica()
        if number is None:
            return seed
        number = tf.cast(number, seed.dtype)
        return seed + tf.stack([number * _SEED_STRIDE, tf.zeros_like(number)])

    return keras.random.SeedGenerator, "next", next_seed


def _tower() -> int | None:
    step = thread_state.current_step()
    return None if step is None else step.index


# Patches for writing shared state, and for drawing random numbers from it.
SHARED_STATE: tuple[patches.Patch, ...] = (
    *ATOMIC_ADDITIONS,
    (compat.KerasVariable, "assign", _assign),
    draws_of(_tower),
)
