"""Reduce first, then apply once, as on a single device.

``Optimizer.apply`` in a tower hands the tower's gradients to one place, where
they are summed over the towers; then Keras's own ``apply`` runs on the sums
exactly as it would on one device. Clipping, accumulation, loss scaling, weight
decay, moving averages and constraints so see the gradient of the global batch,
with no case of their own here. The new weights then go to the towers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.update import gradients, optimizers
from keras_towers.fit.update.one_device import as_one_device, component
from keras_towers.fit.update.order import StepOrder
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.spread import SpreadVariables
from keras_towers.reduction import Gradient, Gradients, Reduction, scaled


class UpdateOnce:
    """Tower 0 updates the weights, and hands them to the others.

    The optimizer's state stays where it is, on tower 0. It costs one update in
    place of K; where the towers share memory, handing out copies nothing.

    Args:
        config: the towers.
        spread: the variables with a component on every tower.
        order: keeps the processes' steps alike.
        reduction: sums K lists of N gradients over all towers; None where a
            subclass does it its own way.
    """

    name = "once"
    description = "weights are updated on tower 0 and handed out"

    def __init__(
        self,
        config: TowerConfig,
        spread: SpreadVariables,
        order: StepOrder,
        reduction: Reduction | None = None,
    ):
        self._config = config
        self._spread = spread
        self._order = order
        self._reduction = reduction
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()

    def place(self, variable: keras.Variable) -> bool:
        """Give every tower a copy."""
        return self._spread.spread_weight(variable)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Take its calls; have its state once."""
        self.take_optimizer(optimizer)
        optimizers.settle(optimizer)
        for variable in optimizer.variables:
            self._place_slot(variable)

    def take_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Let its gradients meet those of the other towers."""
        optimizers.take(optimizer)
        self._taken.add(optimizer)

    def _place_slot(self, variable: keras.Variable) -> None:
        value = variable._value
        if isinstance(value, compat.DistributedVariable) and not isinstance(
            value, variables_lib.TowerVariable
        ):
            variable._value = variables_lib.unbind(value)

    def release_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Give its calls back."""
        optimizers.give_back(optimizer)

    def take_back(self, variable: keras.Variable) -> bool:
        """Nothing is elsewhere."""
        return False

    def release(self) -> None:
        """Give all optimizers' calls back."""
        for optimizer in self._taken:
            optimizers.give_back(optimizer)
        self._taken.clear()

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None,
    ) -> None:
        """Meet the other towers, sum, and update."""
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        variables = list(trainable_variables)
        mine = gradients.TowerGradients(
            tuple(gradients.name_of(v) for v in variables),
            _weighted(optimizer, list(grads)),
        )

        def merge(strategy: tf.distribute.Strategy, towers: Any) -> None:
            towers = strategy.experimental_local_results(towers)
            gradients.check_equal(towers)
            self._make_ready(optimizer, variables)
            self._update(optimizer, original, variables, towers)

        tf.distribute.get_replica_context().merge_call(merge, args=(mine,))

    def _make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer if it is not, and put its state in its place.

        Outside of the function that is being traced, because its variables
        outlive that.
        """
        if not optimizer.built and not tf.executing_eagerly():
            # What was traced before took the optimizer for one without state (a
            # loss scale is then a constant): a tf.function that has made a
            # variable is traced once more.
            tf.Variable(0, trainable=False)
        with tf.init_scope():
            if not optimizer.built:
                with as_one_device(optimizer, variables):
                    optimizer.build(list(variables))
            self.place_optimizer(optimizer)

    def _update(
        self,
        optimizer: Any,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        towers: Sequence[gradients.TowerGradients],
    ) -> None:
        rows = self._sums(variables, towers)
        self._update_tower(optimizer, original, variables, rows[0], 0)
        variables_lib.copy_to_towers(variables)

    def _update_tower(
        self,
        optimizer: Any,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        sums: list[Any],
        index: int,
    ) -> None:
        mine = [component(v, index) for v in variables]
        with as_one_device(optimizer, variables, index, self._shared(mine)):
            original(sums, mine)

    def _shared(self, variables: Sequence[Any]) -> set[int]:
        """Ids of the native variables whose buffers other towers hold."""
        if self._config.num_towers == 1:
            return set()
        return {id(component(getattr(v, "_value", v))) for v in variables}

    def _sums(
        self,
        variables: Sequence[Any],
        towers: Sequence[gradients.TowerGradients],
    ) -> list[list[Any]]:
        """The sums for every tower, None where there is no gradient."""
        present = [grad is not None for grad in towers[0].grads]
        trained = list(itertools.compress(variables, present))
        reduced = self._order.reduce(
            towers[0].described(),
            [[g for g in tower.grads if g is not None] for tower in towers],
            lambda rows: self._reduce(rows, trained),
        )
        rows = []
        for row in reduced:
            sums = iter(row)
            rows.append([next(sums) if there else None for there in present])
        return rows

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        assert self._reduction is not None
        return self._reduction(rows, self._config.devices)


class UpdateEach(UpdateOnce):
    """Every tower applies the same sums to its own copy of the weights.

    Where the towers do not share memory that can be cheaper than handing out.
    """

    name = "each"
    description = "every tower updates its own weights"

    def _place_slot(self, variable: keras.Variable) -> None:
        self._spread.spread(variable, variables_lib.FIRST)

    def _update(self, optimizer, original, variables, towers) -> None:
        rows = self._sums(variables, towers)
        for index, row in enumerate(rows):
            self._update_tower(optimizer, original, variables, row, index)

    def _shared(self, variables: Sequence[Any]) -> set[int]:
        return set()


def _weighted(optimizer: Any, grads: list[Any]) -> list[Any]:
    """Weight the gradients, unless ``scale_loss`` weighted the loss."""
    tower = tower_lib.with_a_share()
    if tower is None:
        return grads
    if tower.weighted_losses[id(optimizer)]:
        tower.weighted_losses[id(optimizer)] -= 1
        return grads
    return [None if g is None else scaled(g, tower.loss_weight) for g in grads]
