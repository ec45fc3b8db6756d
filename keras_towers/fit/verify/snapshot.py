"""Snapshots of all that a step, or building for the step, may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import patches
from keras_towers.fit.context.attributes import (
    attributes_of,
    put_back,
    python_draws,
)
from keras_towers.fit.weights import state as state_lib


def plain_variables_of(model: keras.Model) -> dict[str, tf.Variable]:
    """Return the ``tf.Variable``s in attributes of a model, by name."""
    # Those of Keras variables are not among them.
    found: dict[int, tuple[str, tf.Variable]] = {}

    def visit(name: str, value: Any, depth: int) -> None:
        if isinstance(value, tf.Variable):
            found.setdefault(id(value), (name, value))
        elif isinstance(value, dict) and depth:
            for key, item in list(value.items()):
                visit(f"{name}[{key!r}]", item, depth - 1)
        elif isinstance(value, (list, tuple)) and depth:
            for index, item in enumerate(value):
                visit(f"{name}[{index}]", item, depth - 1)

    for layer in model._flatten_layers():
        for name, value in list(vars(layer).items()):
            if not name.startswith("_self_"):
                visit(f"{layer.name}.{name}", value, 2)
    kept = {id(v._value) for v in state_lib.collect(model).everything()}
    return {
        name: variable
        for key, (name, variable) in found.items()
        if key not in kept
    }


def all_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model and its training, of both kinds."""
    return [
        *state_lib.collect(model).everything(),
        *plain_variables_of(model).values(),
    ]


def compared(model: keras.Model) -> dict[str, Any]:
    """Return the variables that are to be equal after a step, by name."""
    # State of metrics and of draws is not: what it results in is.
    state = state_lib.collect(model)
    skipped = {id(v) for v in (*state.seeds, *state.metrics)}
    return {
        **{v.path: v for v in state.everything() if id(v) not in skipped},
        **plain_variables_of(model),
    }


@contextlib.contextmanager
def created() -> Iterator[dict[int, Any]]:
    """Collect first values of Keras variables that a block creates, by id."""
    values: dict[int, Any] = {}
    variables = []

    def initialize(
        original: Callable[..., None], variable: Any, value: Any
    ) -> None:
        original(variable, value)
        if tf.executing_eagerly():
            values[id(variable)] = variable._value.read_value()
        # Ids of variables that are gone may be used again.
        variables.append(variable)

    undo = patches.wrap(compat.KerasVariable, "_initialize", initialize)
    try:
        yield values
    finally:
        undo()


def values_of(variables: Iterable[Any]) -> dict[int, Any]:
    """Read variables of Keras or TensorFlow; return values by id."""
    return {
        id(v): tf.identity(getattr(v, "_value", v).read_value())
        for v in variables
    }


def load(variables: Iterable[Any], values: dict[int, Any]) -> None:
    """Assign what ``values_of`` returned."""
    for variable in variables:
        if id(variable) in values:
            value = getattr(variable, "_value", variable)
            value.assign(values[id(variable)])


def other_last_bits(model: keras.Model) -> None:
    """Change weights by one unit in the last place, up or down."""
    for variable in model.trainable_variables:
        value = tf.convert_to_tensor(variable._value)
        if value.dtype.is_floating:
            odd = tf.reshape(tf.range(tf.size(value)) % 2, value.shape)
            unit = np.finfo(value.dtype.name).eps
            signs = tf.cast(1 - 2 * odd, value.dtype)
            variable._value.assign(value * (1 + unit * signs))


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Restore variables, attributes and random states after a block."""
    # A layer that is built in the block stays built. An optimizer does not:
    # what it will train may be decided later.
    variables = all_of(model)
    values = values_of(variables)
    parts = [part for part in _objects(model) if _is_restored(part)]
    trackers = [vars(part).get("_tracker") for part in parts]
    parts += [tracker for tracker in trackers if tracker is not None]
    before = [(part, attributes_of(part)) for part in parts]
    restore_randomness = _random_states()
    new: dict[int, Any] = {}
    try:
        with created() as new:
            yield
    finally:
        load(all_of(model), {**new, **values})
        load(variables, values)
        for part, attributes in before:
            put_back(part, attributes)
        restore_randomness()


def _objects(model: keras.Model) -> list[Any]:
    layers = list(model._flatten_layers())
    parts = [*layers, *state_lib.collect(model).optimizers, *model.metrics]
    for layer in layers:
        parts += [
            getattr(layer, name, None)
            for name in ("_loss_tracker", "_compile_metrics", "_compile_loss")
        ]
    return list({id(part): part for part in parts if part is not None}.values())


def _is_restored(part: Any) -> bool:
    return getattr(part, "built", True) or not isinstance(
        part, keras.layers.Layer
    )


def _random_states() -> Callable[[], None]:
    """Return a function that restores the states of random generators."""
    restore_draws = python_draws()
    of_keras = compat.get_global_attribute("global_seed_generator")
    operations = getattr(compat.eager_context(), "_rng", None)
    state = operations and operations.getstate()

    def restore() -> None:
        restore_draws()
        compat.set_global_attribute("global_seed_generator", of_keras)
        if operations:
            operations.setstate(state)

    return restore
