"""Running a training step up to its gradients, without its updates.

The optimizer calls of a step, also of a custom one, are intercepted and their
gradients returned, so that they can be computed separately from the update (for
instance compiled, in parts, or for comparison). No weight is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import Gradients
from keras_towers.fit.update import gradients, optimizers
from keras_towers.fit.weights import state as state_lib


class AskedUpdate(NamedTuple):
    """An optimizer call of a step.

    Attributes:
        optimizer: the optimizer that was called.
        original: the optimizer's own ``apply``.
        variables: the N variables to update.
    """

    optimizer: keras.optimizers.Optimizer
    original: Callable[[list[Any], list[Any]], Any]
    variables: list[Any]


class Backward:
    """Runs forward and backward pass of a step on one device, without updates.

    Metrics, moving statistics and other assignments of the step do happen. In a
    step with several updates (a GAN), all gradients are computed with the
    weights from before the first update.

    Args:
        model: the model whose optimizers the step calls.
        step: takes a batch, as ``model.train_step`` does.

    Attributes:
        updates: the optimizer calls of the last run.

    Example:
        >>> backward = Backward(model, model.train_step)
        >>> logs, gradients = tf.function(backward, jit_compile=True)(batch)
        >>> backward.update(gradients)
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], Any]):
        self._model = model
        self._step = step
        self._gradients: list[list[Any]] = []
        self.updates: list[AskedUpdate] = []

    def __call__(self, batch: Any) -> tuple[Any, list[list[Any]]]:
        """Run the step.

        Args:
            batch: what the step takes.

        Returns:
            The result of the step, and for each update a list of N gradients;
            None for a missing one.
        """
        self.updates, self._gradients = [], []
        tower = tower_lib.Tower(0, 1, training=True)
        tower.update = _Recorder(self._note)
        with contextlib.ExitStack() as stack:
            for optimizer in state_lib.collect(self._model).optimizers:
                if optimizers.taker_of(optimizer) is None:
                    optimizers.take(optimizer, type(self).__name__)
                    stack.callback(optimizers.give_back, optimizer)
            with replica_context.activate(tower):
                result = self._step(batch)
        return result, self._gradients

    def _note(self, update: AskedUpdate, gradients: Sequence[Any]) -> None:
        self.updates.append(update)
        self._gradients.append(list(gradients))

    def update(self, gradients: Sequence[Sequence[Any]]) -> None:
        """Apply gradients, in the order of the step's optimizer calls.

        Args:
            gradients: for each update, N gradients.
        """
        for asked, grads in zip(self.updates, gradients, strict=True):
            asked.original(list(grads), asked.variables)


class _Recorder:
    """Records gradients instead of applying them."""

    def __init__(self, note: Callable[[AskedUpdate, Sequence[Any]], None]):
        self._note = note

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        pass

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        grads: Gradients,
        trainable_variables: Sequence[Any] | None,
    ) -> None:
        variables = gradients.variables_of(optimizer, trainable_variables)
        update = AskedUpdate(optimizer, original, variables)
        self._note(update, grads)
