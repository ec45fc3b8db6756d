"""Makes an existing optimizer reduce its gradients over the ranks.

It keeps its class, but gets an ``apply`` that first reduces gradients and then
calls the original one. So clipping, weight decay and moving averages see the
reduced gradients, as in a single process.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from keras_towers.engines.dropin import variable_key
from keras_towers.fit.calls import tower_call
from keras_towers.fit.components import KerasStrategy
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict, IdentityKey
from keras_towers.fit.ranks.step_agreement import are_equal
from keras_towers.fit.weights.copies import native
from keras_towers.fit.weights.model_state import build_optimizer, optimizers_in
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.rendezvous import activity, rank_checks
from keras_towers.reduction.gradients import Gradient
from keras_towers.transport import Transport
from keras_towers.transport.exchange_counts import GraphCounts, counts_of

# In the optimizer's __dict__: Keras's __setattr__ would search the value for
# variables to track.
_REDUCER = "_keras_towers_reducer"

Grads: TypeAlias = Sequence[Gradient | None]
"""The gradients of N variables; None for a missing one."""


class Reducer(ABC):
    """Reduces the gradients of one optimizer over the ranks.

    Variables, and the variables of layers, may be declared local: every rank
    applies its own gradients to them. If the ranks' gradients differ, the
    reduction fails on all of them.

    Names of layers and optimizers differ if one rank has created more models
    than another, so the keys of collectives are numbered in an order that is
    the same on all ranks.

    Args:
        sparse_as_dense: whether sparse gradients become dense ones.
        key: a part of the keys of its collectives, the same on all ranks, and
            different from any reducer whose reductions may run at the same
            time; None: the next number.

    Attributes:
        module: the usual name of the drop-in's module, for messages.
        all_ranks: whether it reduces over all ranks of the job.
        local_keys: the keys of local variables.
        local_layers: layers of local variables.
        accumulator: sums the gradients of several calls for one update; None:
            each call updates.
    """

    module: str
    all_ranks: bool = True
    _numbers = itertools.count()

    def __init__(self, sparse_as_dense: bool, key: str | None = None):
        self.local_keys: set[IdentityKey[tf.Variable]] = set()
        self.local_layers: list[keras.Layer] = []
        self.accumulator: GradientAccumulator | None = None
        self._sparse_as_dense = sparse_as_dense
        self._key = key
        self._compiled = tf.function(
            self._compare_and_reduce, reduce_retracing=True, autograph=False
        )

    def reduce(
        self, grads: Grads, variables: Sequence[Variable]
    ) -> list[Gradient | None]:
        """Reduce gradients over all ranks: tensors, slices or None."""
        results = [self._to_tensor(grad) for grad in grads]
        if not self.communicates():
            return results
        local_keys = self.all_local_keys()
        is_local = [variable_key(v) in local_keys for v in variables]
        present = {i: g for i, g in enumerate(results) if g is not None}
        chosen = [i for i in present if not is_local[i]]
        reduced = self.reduce_global(
            [present[i] for i in chosen], [variables[i] for i in chosen]
        )
        for i, grad in zip(chosen, reduced, strict=True):
            results[i] = grad
        for i, grad in present.items():
            if is_local[i]:
                results[i] = self.scale_local(grad)
        return results

    def all_local_keys(self) -> set[IdentityKey[tf.Variable]]:
        """The keys of local variables, also of those of local layers."""
        return self.local_keys | {
            variable_key(variable)
            for layer in self.local_layers
            for variable in layer.trainable_weights
        }

    @abstractmethod
    def transport(self) -> Transport:
        """Return the connection to the ranks that it reduces over."""

    def communicates(self) -> bool:
        """Whether there are other ranks to reduce with."""
        return self.transport().size > 1

    def groups_of(
        self, grads: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[list[int]]:
        """Return the indices of the gradients to reduce together."""
        return [[index] for index, _ in enumerate(grads)]

    @abstractmethod
    def reduce_groups(
        self, grads: list[Gradient], groups: list[list[int]], key: str
    ) -> list[Gradient]:
        """Reduce gradients that are the same ones on all ranks.

        Args:
            grads: this rank's gradients.
            groups: the indices of those to reduce together.
            key: of the collectives.
        """

    def reduce_global(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> list[Gradient]:
        """Reduce the gradients of variables that are not local."""
        if self._key is None:
            self._key = str(next(self._numbers))
        # Descriptions, because the function must not keep variables alive.
        described = [
            _describe(index, grad, variable)
            for index, (grad, variable) in enumerate(
                zip(grads, variables, strict=True)
            )
        ]
        groups = self.groups_of(grads, variables)
        if tf.executing_eagerly():
            # Eager operations run in sequence; in a function they overlap.
            return self._compiled(grads, described, groups)
        return self._compare_and_reduce(grads, described, groups)

    def _compare_and_reduce(
        self,
        grads: list[Gradient],
        described: list[tuple[str, str]],
        groups: list[list[int]],
    ) -> list[Gradient]:
        """Reduce gradients, or fail on all ranks if the gradients differ."""

        def reduce(grads: Sequence[Gradient]) -> list[Gradient]:
            with tf.control_dependencies([self._assert_same(described)]):
                return self.reduce_groups([*grads], groups, str(self._key))

        return self._counts.counted(reduce, grads)

    @functools.cached_property
    def _counts(self) -> GraphCounts:
        """The numbers of reductions that have begun, and that have ended."""
        # Counts are compared between ranks, so all ranks have to count.
        name = f"{activity.UPDATE}{self._key}"
        return counts_of(name) if self.all_ranks else GraphCounts()

    def _assert_same(self, described: list[tuple[str, str]]) -> tf.Operation:
        """Return an assertion that all ranks have the same gradients.

        Otherwise each rank could wait for tensors that another never sends.
        """
        transport, key = self.transport(), f"kt.alike.{self._key}"
        text = "\n".join(kind for kind, _ in described)
        digest = tf.constant(zlib.crc32(text.encode()), tf.int64)
        with tf.device(compat.HOST):
            # Reading the variable makes the comparison follow the previous step
            # of a loop, and keeps constant folding from running it.
            digest = tf.where(self._counts.ended >= 0, digest, 0)
            same = tf.reduce_all(are_equal(transport, digest, key))

            def describe_difference() -> str:
                ranks = transport.gather_objects(described)
                return rank_checks.describe_gradients(ranks)

            message = tf.cond(
                same,
                lambda: "",
                lambda: tf.numpy_function(describe_difference, [], tf.string),
            )
            return tf.debugging.Assert(same, [message])

    def scale_local(self, grad: Gradient) -> Gradient:
        """Scale the gradient of a local variable."""
        return grad

    def _to_tensor(self, grad: Gradient | None) -> Gradient | None:
        sparse = isinstance(grad, tf.IndexedSlices)
        if grad is None or (sparse and not self._sparse_as_dense):
            return grad
        return tf.convert_to_tensor(grad)


def name_or_kind(variable: Variable) -> str:
    """Return the name of a variable or tensor; "tensor" if it has none."""
    return getattr(variable, "name", None) or "tensor"


def _describe(
    index: int, grad: Gradient, variable: Variable
) -> tuple[str, str]:
    """Describe a gradient: for a comparison of ranks, and for messages."""
    sparse = "sparse " if isinstance(grad, tf.IndexedSlices) else ""
    kind = f"{list(variable.shape)} {sparse}{grad.dtype.name}"
    name = name_or_kind(variable)
    path = rank_checks.without_numbers(getattr(variable, "path", None) or name)
    return f"{index} {name} {kind}", f"{path} {kind}"


def distribute(
    optimizer: keras.Optimizer,
    reducer: Reducer,
    passes: int,
    average: bool = False,
) -> None:
    """Make an optimizer reduce its gradients from now on.

    Args:
        optimizer: any optimizer of Keras 3 that does not do so yet.
        reducer: reduces the gradients.
        passes: the number of calls whose gradients are summed for one update.
        average: whether to use their mean instead of the sum.
    """
    if not isinstance(optimizer, compat.BaseOptimizer):
        raise TowerError(
            f"{reducer.module}.DistributedOptimizer takes an optimizer of "
            "Keras 3, such as keras.optimizers.SGD(0.1), but got "
            f"{optimizer!r}."
        )
    for inner in optimizers_in(optimizer):
        if reducer_of(inner) is not None:
            raise TowerError(
                f"the optimizer {inner.name!r} is already distributed: call "
                f"{reducer.module}.DistributedOptimizer only once per "
                "optimizer."
            )
    if not isinstance(passes, int) or passes < 1:
        raise TowerError(
            f"backward_passes_per_step is {passes!r}: give 1 or more."
        )
    # A model made inside a strategy's scope would belong to the strategy.
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        _refuse_strategies()
    if passes > 1:
        reducer.accumulator = GradientAccumulator(passes, average)
    _attach(optimizer, reducer)


def reducer_of(optimizer: keras.Optimizer) -> Reducer | None:
    """The reducer of a distributed optimizer; None for any other optimizer."""
    return getattr(optimizer, "__dict__", {}).get(_REDUCER)


def is_distributed(optimizer: object) -> bool:
    """Whether the optimizer, or one that it wraps, reduces over ranks."""
    return any(map(reducer_of, optimizers_in(optimizer)))


def move_reducer_outward(
    optimizer: keras.optimizers.LossScaleOptimizer,
) -> None:
    """Make a ``LossScaleOptimizer`` reduce in place of the optimizer it wraps.

    It has to decide on the reduced gradients whether to skip an update:
    otherwise one rank might skip a reduction while the rest wait for it.
    """
    inner = optimizer.inner_optimizer
    reducer = reducer_of(inner)
    if reducer is not None:
        for name in (_REDUCER, *_METHODS):
            del vars(inner)[name]
        _attach(optimizer, reducer)


def _apply(
    optimizer: keras.Optimizer,
    original: Callable[..., None],
    grads: Iterable[Gradient | None],
    trainable_variables: Iterable[Variable] | None = None,
) -> None:
    """Replaces ``apply``: gradients are reduced first."""
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
    if len(variables) != len(grads):  # Keras raises the error.
        original(grads, trainable_variables)
        return

    def reduce_and_update(grads: Grads) -> None:
        original(reducer.reduce(grads, variables), variables)

    if reducer.accumulator is None:
        reduce_and_update(grads)
        return
    if not optimizer.built:
        # Variables cannot be created inside a branch of tf.cond.
        with tf.init_scope():
            build_optimizer(optimizer, variables)
    reducer.accumulator.apply(grads, variables, reduce_and_update)


def _apply_gradients(
    optimizer: keras.Optimizer,
    original: Callable[..., object],
    grads_and_vars: Iterable[tuple[Gradient | None, Variable]],
) -> object:
    """Replaces ``apply_gradients``, which a strategy may have hooked."""
    _refuse_strategies()
    return original(grads_and_vars)


_METHODS: patches.Shadows = {
    "apply": _apply,
    "apply_gradients": _apply_gradients,
}


def _attach(optimizer: keras.Optimizer, reducer: Reducer) -> None:
    """Make an optimizer use a reducer."""

    def register_local_var(var: Variable) -> None:
        """Do not reduce the gradient of a variable, as in Horovod."""
        reducer.local_keys.add(variable_key(var))

    vars(optimizer).update(
        patches.bind_to(optimizer, _METHODS),
        register_local_var=register_local_var,
        **{_REDUCER: reducer},
    )


def _refuse_strategies() -> None:
    strategy, call = tf.distribute.get_strategy(), tower_call.current()
    # In a call of our strategies, TensorFlow sees the strategy of one device.
    name = None if call is None else call.config.name
    if isinstance(strategy, KerasStrategy) or strategy.num_replicas_in_sync > 1:
        name = type(strategy).__name__
    if name is not None:
        raise TowerError(
            "DistributedOptimizer reduces gradients, and so does the "
            f"current strategy, {name}. Use only one: train outside the "
            "strategy's scope, or use the plain optimizer with the strategy."
        )


class GradientAccumulator:
    """Sums this rank's gradients, and updates on every n-th call."""

    def __init__(self, number: int, average: bool):
        self._number = number
        self._divisor = number if average else 1
        self._count = compat.hidden_variable(0)
        self._sums: IdentityDict[tf.Variable, tf.Variable] = IdentityDict()

    def apply(
        self,
        grads: Grads,
        variables: Sequence[Variable],
        update: Callable[[Grads], None],
    ) -> None:
        """Add N gradients or None, and call ``update`` with N sums if due."""
        sums = [
            self._add(grad, variable)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        count = self._count.assign_add(1)

        def step() -> tf.Tensor:
            update([None if s is None else s / self._divisor for s in sums])
            _reset([self._count, *(s for s in sums if s is not None)])
            return tf.constant(True)

        tf.cond(count >= self._number, step, lambda: tf.constant(False))

    def reset(self) -> None:
        """Discard partial sums."""
        _reset([self._count, *self._sums.values()])

    def _add(
        self, grad: Gradient | None, variable: Variable
    ) -> tf.Variable | None:
        """Add a gradient to the sum for its variable, and return the sum.

        A call may have no gradient of a variable that earlier calls had one of.
        """
        key = native(variable)
        if grad is None:
            return self._sums.get(key)
        if key not in self._sums:
            # Outside of the function being traced, which it outlives.
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
