"""Turns an existing optimizer into one that reduces its gradients first.

Only its class changes: ``apply`` reduces, and calls the original one. Clipping,
decay and averages thus see the reduced gradient, as in a single process.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.dropin import variable_key
from keras_towers.errors import TowerError
from keras_towers.fit.contract import KerasStrategy
from keras_towers.fit.update import optimizers
from keras_towers.fit.weights.state import optimizers_in

# Bypasses Keras's attribute tracking, which searches for variables.
_REDUCER = "_keras_towers_reducer"

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:  # A mixin for optimizer classes.
    _Optimizer = object


class Reducer(ABC):
    """Reduces the gradients of one optimizer over the ranks."""

    called: str

    def __init__(self, sparse_as_dense: bool):
        self.local_keys: set[int] = set()
        self.local_layers: list[keras.Layer] = []
        # Sums several backward passes; None: each one is applied.
        self.passes: Passes | None = None
        # Whether a LossScaleOptimizer wraps the optimizer.
        self.scaled_outside: bool = False
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
            [reduced[i] for i in chosen], [variables[i] for i in chosen], chosen
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
        self, grads: list[Any], variables: list[Any], indices: list[int]
    ) -> list[Any]:
        """Reduce the gradients that all ranks have; indices are among all."""

    def scaled_local(self, grad: Any) -> Any:
        """Return the gradient of a local variable as it is applied."""
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
        _refuse_strategies(optimizer)
    if passes > 1:
        reducer.passes = Passes(passes, average)
    _wrap(optimizer, reducer)


def reducer_of(optimizer: Any) -> Reducer | None:
    """The reducer of a distributed optimizer, None for any other."""
    return getattr(optimizer, "__dict__", {}).get(_REDUCER)


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or one that it wraps, reduces over ranks."""
    return any(map(reducer_of, optimizers_in(optimizer)))


def move_outward(optimizer: Any) -> None:
    """Let a ``LossScaleOptimizer`` reduce for the optimizer it wraps."""
    # Whether to skip an update has to be decided on the reduced gradient: else
    # a rank might skip a reduction that others are waiting for.
    inner = getattr(optimizer, "inner_optimizer", None)
    if reducer_of(inner) is not None:
        reducer = vars(inner).pop(_REDUCER)
        reducer.scaled_outside = False
        _wrap(optimizer, reducer)


def restart_passes(optimizer: Any) -> None:
    """Let a distributed optimizer begin to sum backward passes anew."""
    reducer = reducer_of(optimizer)
    if reducer is not None and reducer.passes is not None:
        reducer.passes.restart()


def _wrap(optimizer: Any, reducer: Reducer) -> None:
    vars(optimizer)[_REDUCER] = reducer
    if not issubclass(type(optimizer), _Distributed):
        # Bypasses Keras's __setattr__, which tracks variables.
        cls: Any = type(optimizer)
        cls = _distributed_class(cls)
        object.__setattr__(optimizer, "__class__", cls)


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
    """Mixin that makes a distributed optimizer of its original class."""

    def apply(
        self, grads: Sequence[Any], trainable_variables: Any = None
    ) -> None:
        reducer = reducer_of(self)
        update = super().apply
        grads = list(grads)
        if reducer is None or not grads:
            update(grads, trainable_variables)
            return
        _refuse_strategies(self)
        if reducer.scaled_outside:
            raise TowerError(
                "a LossScaleOptimizer wraps this distributed optimizer, and "
                "could make a rank skip a step that others wait for. Wrap it "
                "the other way: "
                f"{reducer.called}.DistributedOptimizer("
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
            update(reducer.reduce(grads, variables), variables)

        if reducer.passes is None:
            reduce_and_update(grads)
            return
        if not self.built:
            # Inside a branch of a condition it would be too late.
            with tf.init_scope():
                self.build(variables)
        reducer.passes.apply(grads, variables, reduce_and_update)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        if reducer_of(self) is not None:
            _refuse_strategies(self)
        return super().apply_gradients(grads_and_vars)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable, as in Horovod."""
        vars(self)[_REDUCER].local_keys.add(variable_key(var))

    def __setattr__(self, name: str, value: Any) -> None:
        reducer = reducer_of(self)
        if reducer is not None and name == "loss_scale_factor":
            # Only the constructor of a LossScaleOptimizer sets it to None.
            reducer.scaled_outside = value is None
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


class Passes:
    """Sums this rank's gradients and updates on every n-th call."""

    def __init__(self, number: int, average: bool):
        self._number = number
        self._average = average
        self._sums: dict[Any, tf.Variable] = {}
        self._count: Any = None

    def apply(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[list[Any]], None],
    ) -> None:
        """Add N gradients or None, and call ``update`` with N sums if due."""
        sums: list[Any] = [
            None if grad is None else self._sum(grad, variable)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        for total, grad in zip(sums, grads, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                total.scatter_add(grad)
            elif grad is not None:
                total.assign_add(grad)
        count = self._count.assign_add(1)

        def step() -> tf.Tensor:
            divisor = self._number if self._average else 1
            update(
                [
                    None if total is None else total.read_value() / divisor
                    for total in sums
                ]
            )
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)
            return tf.constant(True)

        tf.cond(count >= self._number, step, lambda: tf.constant(False))

    def restart(self) -> None:
        """Forget the sums that were begun."""
        for variable in (self._count, *self._sums.values()):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))

    def _sum(self, grad: Any, variable: Any) -> tf.Variable:
        key = variable_key(variable)
        # These outlive the function being traced.
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False)  # pyright: ignore[reportArgumentType]
            if key not in self._sums:
                self._sums[key] = tf.Variable(
                    tf.zeros(variable.shape, grad.dtype), trainable=False
                )
        return self._sums[key]
