"""Restoring all that a step, or building for it, may change."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.attributes import attributes_of, put_back
from keras_towers.fit.verify import substitutes
from keras_towers.fit.weights import state as state_lib


def variables_of(model: keras.Model) -> dict[int, Any]:
    """Return the Keras variables of a model and its training, by id."""
    return {id(v): v for v in state_lib.collect(model).everything()}


def plain_variables_of(model: keras.Model) -> dict[str, tf.Variable]:
    """Return the ``tf.Variable``s in attributes of a model, by name.

    Those of Keras variables are not among them.
    """
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
    kept = {id(v._value) for v in variables_of(model).values()}
    return {
        name: variable
        for key, (name, variable) in found.items()
        if key not in kept
    }


def all_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model, of both kinds."""
    return [
        *variables_of(model).values(),
        *plain_variables_of(model).values(),
    ]


@contextlib.contextmanager
def created() -> Iterator[dict[int, Any]]:
    """Collect the first values of Keras variables that a block creates.

    Yields:
        Values by id, filled in the block.
    """
    values: dict[int, Any] = {}
    variables = []

    def initialize(
        name: str, original: Callable[..., None], variable: Any, value: Any
    ) -> None:
        original(variable, value)
        with tf.init_scope():
            values[id(variable)] = variable._value.read_value()
        # Ids of variables that are gone may be used again.
        variables.append(variable)

    place = (compat.KerasVariable, "_initialize")
    with substitutes.replaced([place], initialize):
        yield values


def values_of(variables: Iterable[Any]) -> dict[int, Any]:
    """Read variables of Keras or TensorFlow; return values by id."""
    return {
        id(v): tf.identity(getattr(v, "_value", v).read_value())
        for v in variables
    }


def other_last_bits(
    variables: Iterable[Any], values: dict[int, Any]
) -> dict[int, Any]:
    """Change floating values by one unit in the last place, up or down."""
    found = {}
    for variable in variables:
        value = values[id(variable)]
        if value.dtype.is_floating:
            signs = tf.reshape(
                1 - 2 * (tf.range(tf.size(value)) % 2), value.shape
            )
            unit = np.finfo(value.dtype.as_numpy_dtype).eps
            found[id(variable)] = value * (
                1 + unit * tf.cast(signs, value.dtype)
            )
    return found


def load(variables: Iterable[Any], values: dict[int, Any]) -> None:
    """Assign what ``values_of`` returned."""
    for variable in variables:
        if id(variable) in values:
            value = getattr(variable, "_value", variable)
            value.assign(values[id(variable)])


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Restore variables, attributes and random states after a block.

    A layer that is built in the block stays built. An optimizer does not: what
    it will train may be decided later.
    """
    variables = all_of(model)
    values = values_of(variables)
    parts = [part for part in _objects(model) if _is_restored(part)]
    trackers = [vars(part).get("_tracker") for part in parts]
    parts += [tracker for tracker in trackers if tracker is not None]
    before = [(part, attributes_of(part)) for part in parts]
    seeds = _RandomStates()
    new: dict[int, Any] = {}
    try:
        with created() as new:
            yield
    finally:
        load(all_of(model), {**new, **values})
        load(variables, values)
        for part, attributes in before:
            put_back(part, attributes)
        seeds.restore()


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


class _RandomStates:
    """The states of the random generators of Python, NumPy and TensorFlow."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._keras = compat.get_global_attribute("global_seed_generator")
        operations = getattr(compat.eager_context(), "_rng", None)
        self._operations = operations and (operations, operations.getstate())

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        compat.set_global_attribute("global_seed_generator", self._keras)
        if self._operations:
            generator, state = self._operations
            generator.setstate(state)


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Restore the random generators that are not Keras's after a block."""
    states = _RandomStates()
    try:
        yield
    finally:
        states.restore()
