"""Turns an existing optimizer into one that reduces its gradients first.

It keeps its class, but gets an ``apply`` that reduces and calls the original
one. Clipping, decay and averages thus see the reduced gradient, as in a single
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.engines.dropin import variable_key
from keras_towers.errors import TowerError
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.context import patches
from keras_towers.fit.contract import KerasStrategy
from keras_towers.fit.weights.model_state import optimizers_in

# Bypasses Keras's attribute tracking, which searches for variables.
_REDUCER = "_keras_towers_reducer"


class Reducer(ABC):
    """Reduces the gradients of one optimizer over the ranks."""

    called: str
    # Whether it reduces over all ranks of the job.
    of_all: bool = True

    def __init__(self, sparse_as_dense: bool):
        self.local_keys: set[int] = set()
        self.local_layers: list[keras.Layer] = []
        # Sums several backward passes; None: each one is applied.
        self.passes: Passes | None = None
        self._sparse_as_dense = sparse_as_dense

    def reduce(
        self, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Reduce gradients over all ranks: tensors, slices or None."""
        reduced = [self._as_tensor(grad) for grad in grads]
        if not self.communicates():
            return reduced
        keys = self.local_keys | {
            variable_key(variable)
            for layer in self.local_layers
            for variable in layer.trainable_weights
        }
        local = [variable_key(variable) in keys for variable in variables]
        chosen = [
            i for i, g in enumerate(reduced) if g is not None and not local[i]
        ]
        totals = self.reduce_shared(
            [reduced[i] for i in chosen], [variables[i] for i in chosen]
        )
        for i, total in zip(chosen, totals, strict=True):
            reduced[i] = total
        return [
            self.scaled_local(grad) if own and grad is not None else grad
            for grad, own in zip(reduced, local, strict=True)
        ]

    @abstractmethod
    def communicates(self) -> bool:
        """Whether there are other ranks to reduce with."""

    @abstractmethod
    def reduce_shared(
        self, grads: list[Any], variables: list[Any]
    ) -> list[Any]:
        """Reduce the gradients that all ranks have."""

    def scaled_local(self, grad: Any) -> Any:
        """Return the scaled gradient of a local variable."""
        return grad

    def _as_tensor(self, grad: Any) -> Any:
        sparse = isinstance(grad, tf.IndexedSlices)
        if grad is None or (sparse and not self._sparse_as_dense):
            return grad
        return tf.convert_to_tensor(grad)


def distribute(
    optimizer: Any, reducer: Reducer, passes: Any, average: bool = False
) -> None:
    """Make an optimizer reduce its gradients from now on."""
    if not isinstance(optimizer, compat.BaseOptimizer):
        raise TowerError(
            f"{reducer.called}.DistributedOptimizer takes an optimizer of "
            "Keras 3, such as keras.optimizers.SGD(0.1), but got "
            f"{optimizer!r}."
        )
    for inner in optimizers_in(optimizer):
        if reducer_of(inner) is not None:
            raise TowerError(
                f"the optimizer {inner.name!r} is already distributed: call "
                f"{reducer.called}.DistributedOptimizer only once per "
                "optimizer."
            )
    if not isinstance(passes, int) or passes < 1:
        raise TowerError(
            f"backward_passes_per_step is {passes!r}: give 1 or more."
        )
    # A model that is made there would be the strategy's.
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        _refuse_strategies()
    if passes > 1:
        reducer.passes = Passes(passes, average)
    _give(optimizer, reducer)


def reducer_of(optimizer: Any) -> Reducer | None:
    """The reducer of a distributed optimizer, None for any other."""
    return getattr(optimizer, "__dict__", {}).get(_REDUCER)


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or one that it wraps, reduces over ranks."""
    return any(map(reducer_of, optimizers_in(optimizer)))


def move_outward(optimizer: Any) -> None:
    """Let a ``LossScaleOptimizer`` reduce for the optimizer it wraps.

    Whether to skip an update has to be decided on the reduced gradient: else a
    rank might skip a reduction that others are waiting for.
    """
    inner = optimizer.inner_optimizer
    reducer = reducer_of(inner)
    if reducer is not None:
        for name in (_REDUCER, *_METHODS):
            del vars(inner)[name]
        _give(optimizer, reducer)


def restart_passes(optimizer: Any) -> None:
    """Restart the sum of backward passes of a distributed optimizer."""
    reducer = reducer_of(optimizer)
    if reducer is not None and reducer.passes is not None:
        reducer.passes.restart()


def _apply(
    optimizer: Any,
    original: Callable[..., None],
    grads: Sequence[Any],
    trainable_variables: Any = None,
) -> None:
    """Replace ``apply``: gradients are reduced first."""
    grads = list(grads)
    if not grads:
        original(grads, trainable_variables)
        return
    _refuse_strategies()
    reducer: Reducer = vars(optimizer)[_REDUCER]
    if trainable_variables is None:
        variables = list(optimizer._trainable_variables)
    else:
        variables = trainable_variables = list(trainable_variables)
    if len(variables) != len(grads):  # Keras says what is wrong
        original(grads, trainable_variables)
        return

    def reduce_and_update(grads: list[Any]) -> None:
        original(reducer.reduce(grads, variables), variables)

    if reducer.passes is None:
        reduce_and_update(grads)
        return
    if not optimizer.built:
        # Inside a branch of a condition it would be too late.
        with tf.init_scope():
            optimizer.build(variables)
    reducer.passes.apply(grads, variables, reduce_and_update)


def _apply_gradients(
    optimizer: Any, original: Callable[..., Any], grads_and_vars: Any
) -> Any:
    """Replace ``apply_gradients``, which a strategy may have hooked."""
    _refuse_strategies()
    return original(grads_and_vars)


_METHODS: patches.Shadows = {
    "apply": _apply,
    "apply_gradients": _apply_gradients,
}


def _give(optimizer: Any, reducer: Reducer) -> None:
    """Make an optimizer use a reducer."""

    def register_local_var(var: Any) -> None:
        """Do not reduce the gradient of a variable, as in Horovod."""
        reducer.local_keys.add(variable_key(var))

    # Bypasses Keras's __setattr__, which tracks variables.
    vars(optimizer).update(
        patches.bound(optimizer, _METHODS),
        register_local_var=register_local_var,
        **{_REDUCER: reducer},
    )


def _refuse_strategies() -> None:
    strategy, call = tf.distribute.get_strategy(), call_lib.current()
    # A strategy of ours updates as if on one device.
    name = None if call is None else call.config.name
    if isinstance(strategy, KerasStrategy) or strategy.num_replicas_in_sync > 1:
        name = type(strategy).__name__
    if name is not None:
        raise TowerError(
            "DistributedOptimizer reduces gradients, and so does the "
            f"current strategy, {name}. Use only one: train outside the "
            "strategy's scope, or use the plain optimizer with the strategy."
        )


class Passes:
    """Sums this rank's gradients and updates on every n-th call."""

    def __init__(self, number: int, average: bool):
        self._number = number
        self._divisor = number if average else 1
        self._count = compat.hidden_variable("CPU:0", 0)
        self._sums: dict[int, tf.Variable] = {}

    def apply(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[list[Any]], None],
    ) -> None:
        """Add N gradients or None, and call ``update`` with N sums if due."""
        sums: list[Any] = [
            None if grad is None else self._added(grad, variable)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        count = self._count.assign_add(1)

        def step() -> tf.Tensor:
            update([None if s is None else s / self._divisor for s in sums])
            _reset([self._count, *(s for s in sums if s is not None)])
            return tf.constant(True)

        tf.cond(count >= self._number, step, lambda: tf.constant(False))

    def restart(self) -> None:
        """Discard partial sums."""
        _reset([self._count, *self._sums.values()])

    def _added(self, grad: Any, variable: Any) -> tf.Variable:
        """Add a gradient to the sum of its variable, and return that."""
        key = variable_key(variable)
        if key not in self._sums:
            # It outlives the function being traced.
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, grad.dtype)
                self._sums[key] = tf.Variable(zeros, trainable=False)
        total = self._sums[key]
        if isinstance(grad, tf.IndexedSlices):
            total.scatter_add(grad)
        else:
            total.assign_add(grad)
        return total


def _reset(variables: Sequence[tf.Variable]) -> None:
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
