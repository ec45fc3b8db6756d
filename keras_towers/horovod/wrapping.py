"""An optimizer that reduces its gradients first, made of an existing one.

The optimizer object stays what it is, with its slots, and only gets a class
derived from its own, whose ``apply`` reduces and then calls that of the
optimizer's own class. Clipping, accumulation, loss scaling, weight decay and
moving averages so see the reduced gradient, as in a single process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.contract import KerasStrategy
from keras_towers.fit.update import optimizers
from keras_towers.horovod.passes import Passes
from keras_towers.horovod.reducer import GradientReducer, variable_key

# Kept beside Keras's attributes, which would be searched for variables.
_STATE = "_keras_towers_horovod"

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:  # It is mixed into classes that are optimizers.
    _Optimizer = object


class Distribution:
    """What an optimizer needs to reduce.

    Attributes:
        reducer: how its gradients are reduced.
        passes: how its backward passes are summed, None where each is applied.
        scaled_outside: whether a ``LossScaleOptimizer`` holds the optimizer.
    """

    def __init__(self, reducer: GradientReducer, passes: Passes | None):
        self.reducer = reducer
        self.passes = passes
        self.scaled_outside = False


def distribution_of(optimizer: Any) -> Distribution | None:
    """The state of a distributed optimizer, None for any other one."""
    return getattr(optimizer, "__dict__", {}).get(_STATE)


def wrap(optimizer: Any, state: Distribution) -> None:
    """Let the optimizer reduce from now on."""
    vars(optimizer)[_STATE] = state
    if issubclass(type(optimizer), _Distributed):
        return
    base: Any = type(optimizer)
    # Past Keras's __setattr__, which looks for variables in what is assigned.
    object.__setattr__(optimizer, "__class__", _distributed_class(base))


def move_outward(
    inner: Any, outer: keras.optimizers.LossScaleOptimizer
) -> None:
    """Let the optimizer around ``inner`` reduce in its place.

    Whether an update is skipped has to be decided on the reduced gradient:
    else ranks skip updates, and reductions, that others wait for.
    """
    state = vars(inner).pop(_STATE)
    state.scaled_outside = False
    wrap(outer, state)


@functools.cache
def _distributed_class(base: type) -> type:
    return type(
        base.__name__,
        (_Distributed, base),
        {
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            # What saves the optimizer asks for its class: a file should name
            # the one that can be loaded without this package.
            "__class__": property(lambda self: base),
        },
    )


class _Distributed(_Optimizer):
    """What a distributed optimizer does beside its own class."""

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
                "a LossScaleOptimizer holds this distributed optimizer, and "
                "would let a rank skip a step that others wait for. Turn them "
                "round: hvd.DistributedOptimizer(LossScaleOptimizer(...))."
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
            # In the branch of a condition it would be too late.
            with tf.init_scope():
                self.build(variables)
        state.passes.apply(grads, variables, reduce_and_update)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        if distribution_of(self) is not None:
            _refuse_strategies(self)
        return super().apply_gradients(grads_and_vars)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on this rank, as Horovod does."""
        state: Distribution = vars(self)[_STATE]
        state.reducer.local_keys.add(variable_key(var))

    def __setattr__(self, name: str, value: Any) -> None:
        state = distribution_of(self)
        if state is not None and name == "loss_scale_factor":
            # Only the constructor of a LossScaleOptimizer takes it away.
            state.scaled_outside = value is None
        super().__setattr__(name, value)


def _refuse_strategies(optimizer: Any) -> None:
    strategy = tf.distribute.get_strategy()
    # A strategy of ours has taken the optimizer's calls, and updates as if on
    # one device.
    ours = isinstance(strategy, KerasStrategy) or optimizers.is_taken(optimizer)
    if ours or strategy.num_replicas_in_sync > 1:
        name = type(strategy).__name__ if tf.distribute.has_strategy() else ""
        raise TowerError(
            "hvd.DistributedOptimizer reduces gradients, and so does "
            f"{name or 'the strategy'} that is in force. Use one of them: "
            "train outside the strategy's scope, or give the strategy the "
            "plain optimizer."
        )
