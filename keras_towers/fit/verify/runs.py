"""Updates that record gradients, and what one run of a step leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import told
from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.hooks import keras as hooks
from keras_towers.fit.update import gradients
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.verify.tapes import Differentiated
from keras_towers.fit.weights import variables as variables_lib


@dataclasses.dataclass
class Run:
    """What one run of a step did.

    Attributes:
        updates: the gradients of each call of an optimizer.
        tapes: what its tapes returned, for the global batch.
        logs: what the step returned, as numbers by name.
        state: the values of all variables afterwards, by id.
        error: what it raised instead.
    """

    updates: list[Differentiated] = dataclasses.field(default_factory=list)
    tapes: list[Differentiated] = dataclasses.field(default_factory=list)
    logs: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[int, Any] = dataclasses.field(default_factory=dict)
    error: Exception | None = None


class RecordedUpdate:
    """Applies gradients as one device does, and records them.

    Args:
        applies: whether to apply them, rather than only build optimizers.

    Attributes:
        calls: the gradients of each call of an optimizer.
    """

    def __init__(self, applies: bool = True):
        self.calls: list[Differentiated] = []
        self._applies = applies

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        pass

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None,
    ) -> None:
        variables = gradients.variables_of(optimizer, trainable_variables)
        names = tuple(gradients.name_of(v) for v in variables)
        self.calls.append(Differentiated(names, list(grads)))
        if self._applies:
            original(list(grads), variables)
        elif not optimizer.built:
            optimizer.build(variables)


class ComparedUpdate(UpdateOnce):
    """Records the sums of the towers' gradients; applies other gradients.

    With those of one device, what the step does next starts equal.

    Args:
        *args: as for ``UpdateOnce``.
        whole: the gradients of one device, for each call of an optimizer.

    Attributes:
        calls: the sums of the towers' gradients.
    """

    def __init__(self, *args: Any, whole: Sequence[Differentiated]):
        super().__init__(*args)
        self._whole = whole
        self.calls: list[Differentiated] = []

    def _update(self, optimizer, original, variables, towers) -> None:
        sums = self._sums(variables, towers)[0]
        names = tuple(towers[0].names)
        place = len(self.calls)
        self.calls.append(Differentiated(names, sums))
        if place < len(self._whole) and self._whole[place].names == names:
            sums = self._whole[place].grads
        self._update_tower(optimizer, original, variables, list(sums), 0)
        variables_lib.copy_to_towers(variables)


@contextlib.contextmanager
def on_one_device(update: RecordedUpdate) -> Iterator[None]:
    """Run steps as plain Keras does, but with another update."""
    tower = tower_lib.Tower(0, 1, training=True, update=update)
    with (
        hooks.installed(),
        compat.single_device_mode(),
        replica_context.activate(tower),
    ):
        yield


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Log and announce nothing that a strategy would, inside a block.

    TensorFlow warns of strategies that run eagerly; and what a real strategy
    would warn of is not worth a warning before there is one.
    """
    loggers = [tf.get_logger(), logging.getLogger("keras_towers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with told.heard():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run functions of the user eagerly, so that tensors have values."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def step_of(model: keras.Model) -> Callable[[Any], Any]:
    """The training step of a model, also where it is a ``tf.function``."""
    return getattr(model.train_step, "python_function", model.train_step)
