"""Turns an existing optimizer into one that reduces its gradients first.

The optimizer object and its slots stay the same. Only its class changes, to a
subclass whose ``apply`` reduces the gradients and then calls the original one.
So clipping, accumulation, loss scaling, weight decay and moving averages see
the reduced gradient, as in a single process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.dropin.engine import variable_key
from keras_towers.dropin.passes import Passes
from keras_towers.errors import TowerError
from keras_towers.fit.contract import KerasStrategy
from keras_towers.fit.update import optimizers

# Bypasses Keras's attribute tracking, which searches for variables.
_STATE = "_keras_towers_horovod"

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:  # A mixin for optimizer classes.
    _Optimizer = object


class Reducer(Protocol):
    """Reduces the gradients of one optimizer over the ranks.

    Attributes:
        called: what the user calls the module that made it.
        local_keys: keys of variables whose gradients are not reduced.
        local_layers: layers whose gradients are not reduced.
    """

    called: str
    local_keys: set[Any]
    local_layers: list[Any]

    def reduce(
        self, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Reduce the gradients, or None, of variables."""
        ...


class Distribution:
    """What an optimizer needs to reduce its gradients.

    Attributes:
        reducer: how its gradients are reduced.
        passes: sums several backward passes; None: each one is applied.
        scaled_outside: whether a ``LossScaleOptimizer`` wraps the optimizer.
    """

    def __init__(self, reducer: Reducer, passes: Passes | None):
        self.reducer = reducer
        self.passes = passes
        self.scaled_outside = False


def distribution_of(optimizer: Any) -> Distribution | None:
    """The state of a distributed optimizer, None for any other."""
    return getattr(optimizer, "__dict__", {}).get(_STATE)


def wrap(optimizer: Any, state: Distribution) -> None:
    """Make the optimizer reduce from now on.

    Raises:
        TowerError: it is made in the scope of a strategy that reduces.
    """
    # A model that is made there would be the strategy's.
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        _refuse_strategies(optimizer)
    vars(optimizer)[_STATE] = state
    if issubclass(type(optimizer), _Distributed):
        return
    base: Any = type(optimizer)
    # Bypasses Keras's __setattr__, which tracks variables.
    object.__setattr__(optimizer, "__class__", _distributed_class(base))


def move_outward(
    inner: Any, outer: keras.optimizers.LossScaleOptimizer
) -> None:
    """Let the optimizer that wraps ``inner`` reduce in its place.

    Whether to skip an update has to be decided on the reduced gradient.
    Otherwise a rank might skip a reduction that others are waiting for.
    """
    state = vars(inner).pop(_STATE)
    state.scaled_outside = False
    wrap(outer, state)


def restart_passes(optimizer: Any) -> None:
    """Let a distributed optimizer begin to sum backward passes anew."""
    state = distribution_of(optimizer)
    if state is not None and state.passes is not None:
        state.passes.restart()


@functools.cache
def _distributed_class(base: type) -> type:
    return type(
        base.__name__,
        (_Distributed, base),
        {
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            # Saving an optimizer records this class: files should load without
            # this package.
            "__class__": property(lambda self: base),
        },
    )


class _Distributed(_Optimizer):
    """What a distributed optimizer adds to its original class."""

    def apply(
        self, grads: Sequence[Any], trainable_variables: Any = None
    ) -> None:
        state = distribution_of(self)
        update = super().apply
        grads = list(grads)
        if state is None or not grads:
            update(grads, trainable_variables)
            return
        _refuse_strategies(self)
        if state.scaled_outside:
            raise TowerError(
                "a LossScaleOptimizer wraps this distributed optimizer, and "
                "could make a rank skip a step that others wait for. Wrap it "
                "the other way: "
                f"{state.reducer.called}.DistributedOptimizer("
                "LossScaleOptimizer(...))."
            )
        if trainable_variables is None:
            variables = compat.trained_by(self)
        else:
            variables = trainable_variables = list(trainable_variables)
        if len(variables) != len(grads):  # Keras says what is wrong
            update(grads, trainable_variables)
            return

        def reduce_and_update(grads: list[Any]) -> None:
            update(state.reducer.reduce(grads, variables), variables)

        if state.passes is None:
            reduce_and_update(grads)
            return
        if not self.built:
            # Inside a branch of a condition it would be too late.
            with tf.init_scope():
                self.build(variables)
        state.passes.apply(grads, variables, reduce_and_update)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        if distribution_of(self) is not None:
            _refuse_strategies(self)
        return super().apply_gradients(grads_and_vars)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable, as in Horovod."""
        state: Distribution = vars(self)[_STATE]
        state.reducer.local_keys.add(variable_key(var))

    def __setattr__(self, name: str, value: Any) -> None:
        state = distribution_of(self)
        if state is not None and name == "loss_scale_factor":
            # Only the constructor of a LossScaleOptimizer sets it to None.
            state.scaled_outside = value is None
        super().__setattr__(name, value)


def _refuse_strategies(optimizer: Any) -> None:
    strategy = tf.distribute.get_strategy()
    # A strategy of ours updates as if on one device.
    name = optimizers.taker_of(optimizer)
    if isinstance(strategy, KerasStrategy) or strategy.num_replicas_in_sync > 1:
        name = type(strategy).__name__
    if name is not None:
        raise TowerError(
            "DistributedOptimizer reduces gradients, and so does the "
            f"current strategy, {name}. Use only one: train outside the "
            "strategy's scope, or use the plain optimizer with the strategy."
        )
