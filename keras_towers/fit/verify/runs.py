"""One run of a step, on one device or on towers that share it."""

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
from keras_towers.fit.capture.capture import Captured, capture
from keras_towers.fit.context.tower import Tower
from keras_towers.fit.contract import NamedGradients, UpdateCall
from keras_towers.fit.hooks import keras as hooks
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.reduction import Gradients


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

    updates: Sequence[NamedGradients] = dataclasses.field(default_factory=list)
    tapes: list[NamedGradients] = dataclasses.field(default_factory=list)
    logs: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[int, Any] = dataclasses.field(default_factory=dict)
    error: Exception | None = None


class ComparedUpdate(UpdateOnce):
    """Records the sums of the towers' gradients; applies other gradients.

    With those of one device, what the step does next starts equal.

    Args:
        *args: as for ``UpdateOnce``.
        whole: the gradients of one device, for each call of an optimizer.

    Attributes:
        calls: the sums of the towers' gradients.
    """

    def __init__(self, *args: Any, whole: Sequence[NamedGradients]):
        super().__init__(*args)
        self._whole = whole
        self.calls: list[NamedGradients] = []

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        sums = self._sums(call, rows)[0]
        place = len(self.calls)
        self.calls.append(dataclasses.replace(call, grads=sums))
        if place < len(self._whole) and self._whole[place].names == call.names:
            sums = self._whole[place].grads
        self._update_tower(call, list(sums), 0)
        variables_lib.copy_to_towers(call.variables)


def on_one_device(
    model: keras.Model, batch: Any, at_update: Callable[[UpdateCall], Any]
) -> Captured:
    """Run the training step of a model as plain Keras does.

    Args:
        model: the model.
        batch: what its step takes.
        at_update: called at each update, which has no other effect.
    """
    with hooks.installed(), compat.single_device_mode():
        tower = Tower(0, 1, training=True)
        return capture(step_of(model), batch, tower, at_update)


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
