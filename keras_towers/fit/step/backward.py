"""A step of Keras up to its gradients, and the updates that it asks for.

Every step, also a user's own, ends its computation on one tower where it calls
an optimizer. Here it is stopped there: the gradients are a result like any
other, to be computed in another way than the update (compiled, in pieces, for
comparison), and no weight is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import Gradients
from keras_towers.fit.update import optimizers
from keras_towers.fit.weights import state as state_lib


class AskedUpdate(NamedTuple):
    """An update that a step has asked for.

    Attributes:
        optimizer: the optimizer that it called.
        original: the optimizer's own ``apply``.
        variables: the N variables to update.
    """

    optimizer: keras.optimizers.Optimizer
    original: Callable[[list[Any], list[Any]], Any]
    variables: list[Any]


class Backward:
    """Runs a step on one device, forward and backward, without its updates.

    What the step does by itself (metrics, moving statistics, assignments) is
    done. A step that goes on with what its first update has made of the
    weights, as of a GAN, computes its later gradients on the weights of before.

    Args:
        model: the model whose optimizers the step calls.
        step: takes a batch, as ``model.train_step`` does.

    Attributes:
        updates: what the last run has asked for.

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
            What the step returned, and for each update that it asked for the N
            gradients, None where there is none.
        """
        self.updates, self._gradients = [], []
        tower = tower_lib.Tower(0, 1, training=True)
        tower.update = _Recorder(self._note)
        with contextlib.ExitStack() as stack:
            for optimizer in state_lib.collect(self._model).optimizers:
                if not optimizers.is_taken(optimizer):
                    optimizers.take(optimizer)
                    stack.callback(optimizers.give_back, optimizer)
            with tower_lib.activate(tower):
                result = self._step(batch)
        return result, self._gradients

    def _note(self, update: AskedUpdate, gradients: Sequence[Any]) -> None:
        self.updates.append(update)
        self._gradients.append(list(gradients))

    def update(self, gradients: Sequence[Sequence[Any]]) -> None:
        """Let the optimizers apply gradients, in the order of the step."""
        for asked, grads in zip(self.updates, gradients, strict=True):
            asked.original(list(grads), asked.variables)


class _Recorder:
    """Takes gradients, and only notes what it is asked for."""

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
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        update = AskedUpdate(optimizer, original, list(trainable_variables))
        self._note(update, grads)
