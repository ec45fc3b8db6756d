"""A step on one device or on towers, with the gradients that it applies."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import told
from keras_towers.fit.capture.capture import capture
from keras_towers.fit.context import patches
from keras_towers.fit.context.tower import Tower
from keras_towers.fit.contract import NamedGradients, UpdateCall
from keras_towers.fit.hooks import keras as hooks
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.reduction import Gradient, Gradients

Step: TypeAlias = Callable[
    [Any, Sequence[NamedGradients]], tuple[Any, Sequence[NamedGradients]]
]
"""Takes a batch and gradients to apply; returns logs and its own gradients."""


@dataclasses.dataclass
class Run:
    """One run of a step: its gradients, logs and variables."""

    # The gradients of each call of an optimizer.
    updates: list[NamedGradients]
    # The logs of the step, as numbers by name.
    logs: dict[str, Any]
    # The values of all variables afterwards, by id.
    state: dict[int, Any] = dataclasses.field(default_factory=dict)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class RecordedStep:
    """A step that is traced once for all batches; or run eagerly."""

    # It runs eagerly without a ``spec``. The gradients that it will be given
    # have the shapes of ``given``; ``retrying`` makes a function of a batch one
    # that tries again, if need be.

    def __init__(
        self,
        step: Step,
        spec: Any = None,
        given: Sequence[NamedGradients] = (),
        retrying: Callable[[Callable[..., Any]], Callable[..., Any]] = _once,
    ):
        self._retrying = retrying
        self._step = step
        self._given = given
        self._made: Sequence[NamedGradients] = ()
        self._function: Any = self._run
        if spec is not None:
            self._function = tf.function(
                tf.autograph.experimental.do_not_convert(self._run),
                input_signature=[spec, list(map(_spec_of, _present(given)))],
                autograph=False,
            )

    def __call__(self, batch: Any, given: Sequence[NamedGradients] = ()) -> Run:
        """Run the step on a batch."""
        self._given = given

        def run(batch: Any) -> Any:
            return self._function(batch, _present(given))

        with _untraced_functions():
            logs, grads = self._retrying(run)(batch)
        return Run(_named(self._made, grads), _numbers(logs))

    def _run(self, batch: Any, given: Sequence[Any]) -> tuple[Any, list[Any]]:
        logs, self._made = self._step(batch, _named(self._given, given))
        return logs, _present(self._made)


class ComparedUpdate(UpdateOnce):
    """Records the sums of the towers' gradients; applies other gradients."""

    # With those of one device, what the step does next starts equal.

    _calls: list[NamedGradients]
    _instead: Sequence[NamedGradients] = ()

    def recorded(self, step: Callable[[Any], Any]) -> Step:
        """Return a step that applies the gradients that it is given."""

        def run(batch: Any, given: Sequence[NamedGradients]) -> Any:
            self._calls, self._instead = [], given
            logs = step(batch)
            return logs, self._calls

        return run

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        sums = self._sums(call, rows)[0]
        place = len(self._calls)
        self._calls.append(NamedGradients(call.names, sums))
        if place < len(self._instead):
            other = self._instead[place]
            if other.names == call.names:
                sums = other.grads
        self._update_tower(call, list(sums), 0)
        variables_lib.copy_to_towers(call.variables)


def on_one_device(
    model: keras.Model, at_update: Callable[[UpdateCall], Any] = UpdateCall.run
) -> Step:
    """Return the training step of a model as plain Keras runs it."""
    # ``at_update`` is called at each update, which has no other effect.
    step = step_of(model)

    def run(batch: Any, given: Sequence[NamedGradients]) -> Any:
        with hooks.installed(), compat.single_device_mode():
            tower = Tower(0, 1, training=True)
            captured = capture(step, batch, tower, at_update)
        return captured.output, captured.updates

    return run


def step_of(model: keras.Model) -> Callable[[Any], Any]:
    """The training step of a model, also where it is a ``tf.function``."""
    return getattr(model.train_step, "python_function", model.train_step)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Log and announce nothing that a strategy would, inside a block."""
    # TensorFlow warns of strategies that run eagerly; and what a real strategy
    # would warn of is not worth a warning before there is one.
    with contextlib.ExitStack() as stack, told.heard():
        for logger in (tf.get_logger(), logging.getLogger("keras_towers")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run functions of the user eagerly inside a block."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def _untraced_functions() -> Iterator[None]:
    """Trace each ``tf.function`` that a step calls anew, inside a block."""
    # What it has been traced for before does not tell what is found out in a
    # trace; and what is traced for no training must not be used in it.
    fresh: dict[int, tuple[Any, Any]] = {}

    def call(
        original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if tf.executing_eagerly():
            return original(function, *args, **kwargs)
        if id(function) not in fresh:
            # The function is kept, too: another could get its id.
            fresh[id(function)] = function, compat.untraced(function)
        return original(fresh[id(function)][1], *args, **kwargs)

    undo = patches.wrap(compat.Function, "__call__", call)
    try:
        yield
    finally:
        undo()


def _present(calls: Sequence[NamedGradients]) -> list[Gradient]:
    """Return all gradients that are not None."""
    return [g for call in calls for g in call.grads if g is not None]


def _spec_of(grad: Gradient) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlicesSpec(
            *(grad.shape, grad.dtype, grad.indices.dtype),
            None if grad.dense_shape is None else grad.dense_shape.dtype,
        )
    return tf.TensorSpec(grad.shape, grad.dtype)


def _named(
    calls: Sequence[NamedGradients], grads: Sequence[Any]
) -> list[NamedGradients]:
    """Undo ``_present``."""
    rest = iter(grads)
    return [
        NamedGradients(
            call.names, [g if g is None else next(rest) for g in call.grads]
        )
        for call in calls
    ]


def _numbers(logs: Any) -> dict[str, Any]:
    """Return the logs of a step as arrays by name."""
    found = {}
    for path, leaf in keras.tree.flatten_with_path(logs):
        array = np.asarray(leaf)
        if array.dtype.kind in "fiub":
            found["/".join(map(str, path)) or "loss"] = array
    return found
