"""Sums gradients over ranks, dense or sparse; keeps the states of hooks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.incomplete_classes import name_of
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Variable
from keras_towers.reduction.compression_hooks import (
    CommunicationHook,
    all_reduce,
)
from keras_towers.reduction.gradients import (
    Gradient,
    check_sums,
    dense_of,
)
from keras_towers.reduction.stateful_hooks import (
    HookState,
    StatefulHook,
    as_stateful,
)
from keras_towers.transport import Transport, next_key

Summed = TypeVar("Summed", bound=Gradient)

StateLayout: TypeAlias = list[list[list[tuple[list[int | None], str, bool]]]]
"""The tensors of each state of each optimizer.

A tensor is its shape, the name of its dtype, and whether it is a rank's own.
"""


def sum_over_ranks(
    transport: Transport,
    grads: Sequence[Summed],
    hook: CommunicationHook = all_reduce,
    key: str | None = None,
) -> list[Summed]:
    """Sum each of N gradients over the ranks.

    A hook sums dense gradients. Of sparse ones, such as those of an embedding,
    the slices of all ranks are gathered, and the optimizer adds up equal rows.

    Args:
        transport: connects the ranks.
        grads: this rank's gradients.
        hook: sums the dense ones.
        key: of the collectives; None: the next one.
    """
    key = next_key("sum") if key is None else key
    totals = iter(hook(transport, dense_of(grads), key))
    # Sparse gradients become the slices of all ranks, in rank order.
    sums: list[Any] = [
        tf.IndexedSlices(
            transport.all_gather(grad.values, f"{key}.values.{n}"),
            transport.all_gather(grad.indices, f"{key}.indices.{n}"),
            grad.dense_shape,
        )
        if isinstance(grad, tf.IndexedSlices)
        else next(totals)
        for n, grad in enumerate(grads)
    ]
    return sums


@dataclasses.dataclass(frozen=True)
class SavedStates:
    """The states of all ranks, as plain data.

    Attributes:
        layout: what the states have, the same on all ranks.
        values: for each rank, the values of all tensors of the layout, in its
            order. Rank 0 has them, and other ranks have none.
    """

    layout: StateLayout
    values: list[list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class _KeptState:
    """A hook's state in variables, with the weights that it is for.

    It keeps the weights alive, since their ids identify it.
    """

    weights: Sequence[Variable]
    variables: HookState

    def leaves(self) -> list[tuple[tf.Variable, bool]]:
        """Return the variables, and whether each differs between ranks."""
        own, common = map(tf.nest.flatten, self.variables)
        return [*((v, True) for v in own), *((v, False) for v in common)]

    def assign(self, saved: Sequence[np.ndarray | tf.Tensor]) -> None:
        """Assign saved values; warn if they are of another state."""
        variables = [variable for variable, _ in self.leaves()]
        wanted = [list(variable.shape) for variable in variables]
        if wanted != [list(value.shape) for value in saved]:
            logger.warning(
                "the backup has the state of another communication hook. This "
                "hook begins with its first state instead"
            )
            return
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(tf.cast(value, variable.dtype))


class RankSum:
    """Sums gradients over the ranks by a hook, whose state it keeps.

    For each list of weights, an optimizer has a state of its own in variables,
    like slots.

    Args:
        transport: connects the ranks.
        hook: sums dense gradients.
    """

    def __init__(
        self,
        transport: Transport,
        hook: CommunicationHook | StatefulHook = all_reduce,
    ):
        self._transport = transport
        self._hook: StatefulHook = as_stateful(hook)
        self._name: str = f"the communication hook {name_of(hook)}"
        self._states: weakref.WeakKeyDictionary[
            keras.Optimizer, dict[tuple[int | tf.TensorSpec, ...], _KeptState]
        ] = weakref.WeakKeyDictionary()
        # For each optimizer, the values of states that do not exist yet.
        self._restored: weakref.WeakKeyDictionary[
            keras.Optimizer, list[list[tf.Tensor]]
        ] = weakref.WeakKeyDictionary()

    def sum(
        self,
        optimizer: keras.Optimizer,
        weights: Sequence[Variable],
        grads: Sequence[Gradient],
    ) -> list[Gradient]:
        """Sum each of N gradients over the ranks.

        Args:
            optimizer: whose state the hook gets.
            weights: the N weights.
            grads: this rank's gradients.
        """
        hook = functools.partial(self._sum_dense, optimizer, weights)
        return sum_over_ranks(self._transport, grads, hook)

    def _sum_dense(
        self,
        optimizer: keras.Optimizer,
        weights: Sequence[Variable],
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        key: str,
    ) -> list[tf.Tensor]:
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        variables = self._variables(optimizer, weights, specs)
        before = tf.nest.map_structure(lambda v: v.read_value(), variables)
        result = self._hook.sum(transport, tensors, before, key)
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], HookState)
        ):
            raise TowerError(
                f"sum of {self._name} must return the sums and the next "
                f"HookState, not {result!r}."
            )
        sums, after = result
        check_sums(sums, tensors, self._name)
        try:
            stored = tf.nest.map_structure(
                lambda variable, value: variable.assign(
                    value, read_value=False
                ),
                variables,
                after,
            )
        except (TypeError, ValueError) as error:
            raise TowerError(
                f"the next state of {self._name} needs the structure, shapes "
                f"and dtypes of that of init: {error}"
            ) from error
        assignments = tf.nest.flatten(stored)
        if not assignments:
            return [*sums]
        # Nothing else in the graph depends on them.
        with tf.control_dependencies(assignments):
            return [tf.identity(total) for total in sums]

    def _variables(
        self,
        optimizer: keras.Optimizer,
        weights: Sequence[Variable],
        specs: Sequence[tf.TensorSpec],
    ) -> HookState:
        states = self._states.setdefault(optimizer, {})
        key = (*map(id, weights), *specs)
        if key not in states:
            with tf.init_scope(), compat.single_device_mode():
                first = self._hook.init(specs)
                if not isinstance(first, HookState):
                    raise TowerError(
                        f"init of {self._name} must return a HookState, not "
                        f"{first!r}."
                    )
                variables = tf.nest.map_structure(
                    lambda value: tf.Variable(value, trainable=False), first
                )
                states[key] = _KeptState(list(weights), variables)
                restored = self._restored.get(optimizer)
                if restored:
                    states[key].assign(restored.pop(0))
        return states[key].variables

    @property
    def held_bytes(self) -> int:
        """The bytes of all states."""
        return sum(
            variable.shape.num_elements() * variable.dtype.size
            for states in self._states.values()
            for state in states.values()
            for variable, _ in state.leaves()
        )

    @property
    def kept_bytes(self) -> int:
        """The bytes of the memory in which ranks of a machine sum, if any."""
        return self._hook.kept_bytes

    def states(self, optimizer: keras.Optimizer) -> list[HookState]:
        """Return this rank's states for an optimizer's variables."""
        return [state.variables for state in self._states_of(optimizer)]

    def _states_of(self, optimizer: keras.Optimizer) -> list[_KeptState]:
        return [*self._states.get(optimizer, {}).values()]

    def save(self, optimizers: Sequence[keras.Optimizer]) -> SavedStates:
        """Return the states of all ranks, for some optimizers. Collective."""
        leaves = [
            [state.leaves() for state in self._states_of(optimizer)]
            for optimizer in optimizers
        ]
        flat = itertools.chain.from_iterable(itertools.chain(*leaves))
        own = [variable.read_value() for variable, _ in flat]
        values: list[list[np.ndarray]] = []
        # One rank after another: only rank 0 has room for all.
        for rank in range(self._transport.size):
            sent = self._transport.broadcast(own, next_key("hook"), rank)
            if own and self._transport.rank == 0:
                values.append([value.numpy() for value in sent])
        layout = [
            [
                [(list(v.shape), v.dtype.name, is_own) for v, is_own in state]
                for state in states
            ]
            for states in leaves
        ]
        return SavedStates(layout, values)

    def restore(
        self, optimizers: Sequence[keras.Optimizer], saved: SavedStates
    ) -> None:
        """Give each rank its saved state. Collective.

        If the number of ranks has changed, each gets an equal share of the sum
        of the values that differed between ranks.

        Args:
            optimizers: as many as were saved.
            saved: the states.
        """
        tensors = [*itertools.chain(*itertools.chain(*saved.layout))]
        if not tensors:
            return
        size, me = self._transport.size, self._transport.rank
        rows = saved.values
        if me == 0 and len(rows) != size:
            is_own = [own for _, _, own in tensors]
            rows = [_shares(rows, is_own, size) for _ in range(size)]
        received = []
        for rank in range(size):
            sent = [tf.zeros(shape, dtype) for shape, dtype, _ in tensors]
            if me == 0:
                sent = [tf.constant(value) for value in rows[rank]]
            sent = self._transport.broadcast(sent, next_key("hook"))
            if rank == me:
                received = sent
        values = iter(received)
        for optimizer, layout in zip(optimizers, saved.layout, strict=True):
            of_states = [[next(values) for _ in leaves] for leaves in layout]
            for state in self._states_of(optimizer):
                if of_states:
                    state.assign(of_states.pop(0))
            self._restored[optimizer] = of_states


def _shares(
    rows: list[list[np.ndarray]], is_own: Sequence[bool], size: int
) -> list[np.ndarray]:
    """Return each new rank's share of the old ranks' values."""
    return [
        (np.sum(values, 0, "float64") / size).astype(values[0].dtype)
        if own
        else values[0]
        for own, *values in zip(is_own, *rows, strict=True)
    ]
