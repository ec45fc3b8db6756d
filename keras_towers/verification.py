"""A measurement: how far training on towers is from one device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers.errors import TowerError
from keras_towers.fit import contract
from keras_towers.fit.context import attributes, blocks
from keras_towers.fit.data.iterator import Undistributed
from keras_towers.fit.weights import state, trainers

if TYPE_CHECKING:
    from keras_towers.strategies.base import BaseStrategy

_Values: TypeAlias = dict[str, np.ndarray]

# What rounding alone changes by more is not determined on one device either,
# such as a bias before BatchNormalization, whose gradient is all rounding.
_DETERMINED = 0.01
# What ``fit`` sets of every model.
_OF_FIT = ("train_function", "stop_training", "history", "_eval_epoch_iterator")


@dataclasses.dataclass(frozen=True)
class Verification:
    """How far a few steps on towers are from the same on one device.

    Attributes:
        difference: the largest relative difference of any weight, optimizer
            variable or log of a step: that of its largest number.
        where: the name of what differs by that much.
        rounding: by how much that differs on one device if the weights begin
            one unit in the last place away.
        steps: the number of steps that were compared.
        description: what the strategy says of itself.

    Example:
        >>> print(keras_towers.verify(model, x, y))
        After 3 steps the largest relative difference from one device is
        1.2e-07, in dense/kernel (6.0e-08 by rounding alone).
        TowerStrategy: 2 towers (/device:CPU:0 to /device:CPU:1)
          ...
    """

    difference: float
    where: str
    rounding: float
    steps: int
    description: str

    def __str__(self) -> str:
        return (
            f"After {self.steps} step{'s' * (self.steps > 1)} the largest "
            "relative difference from one device is\n"
            f"{self.difference:.1e}, in {self.where} ({self.rounding:.1e} by "
            f"rounding alone).\n{self.description}"
        )


def verify(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    strategy: BaseStrategy | None = None,
    batch_size: int | None = None,
    steps: int = 3,
) -> Verification:
    """Measure how far training on towers is from training on one device.

    ``fit`` runs a few steps on one device and on towers, on the same batches
    and from the same weights, and what results is compared. What one device
    itself does not determine, because rounding changes it, is left out.

    Afterwards the model is as it was; one that was not built is built. A
    generator loses the batches that were drawn.

    Args:
        model: a compiled model.
        x: data, as for ``fit``: arrays, dictionaries, datasets, generators.
        y: targets, as for ``fit``.
        sample_weight: weights of the examples, as for ``fit``.
        strategy: the towers; None: ``TowerStrategy()``.
        batch_size: examples in a batch of arrays, as for ``fit``.
        steps: how many steps to run, each on a batch.

    Raises:
        TowerError: the model is not compiled, or is on towers; there are no
            data, or arguments are invalid. Errors of its step are raised as
            they are.
    """
    number = devices.whole(steps)
    if number is None or number < 1:
        raise TowerError(
            f"steps={steps!r} is not allowed: give a whole number, 1 or more."
        )
    _check(model)
    if strategy is None:
        from keras_towers.strategies.tower import TowerStrategy

        strategy = TowerStrategy()
    data = _first_batches(x, y, sample_weight, batch_size, number)
    if not all(layer.built for layer in model._flatten_layers()):
        _build(model, data.take(1))
    with _left_as_it_was(model):
        one = {**_logs_of_fit(model, data), **_values(model)}
    with _left_as_it_was(model):
        _change_last_bits(model)
        near = {**_logs_of_fit(model, data), **_values(model)}
    with _left_as_it_was(model):
        with strategy:
            logs = _logs_of_fit(model, data)
        other = {**logs, **_values(model)}
    found, rounding = _differences(one, other), _differences(one, near)
    determined = [n for n in found if rounding[n] <= _DETERMINED] or [*found]
    where = max(determined, key=lambda name: found[name])
    return Verification(
        found[where],
        where,
        rounding[where],
        int(data.cardinality()),
        strategy.describe(),
    )


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model) or not model.compiled:
        raise TowerError(f"verify takes a compiled keras.Model, not {model!r}.")
    if not tf.distribute.has_strategy():
        trainers.leave_home(model)
    if tf.distribute.has_strategy() or contract.home_of(model) is not None:
        raise TowerError(
            f"verify was called in the scope of a strategy, or model "
            f"{model.name!r} is on one: call it before the `with` block."
        )


def _first_batches(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int
) -> tf.data.Dataset:
    """Read batches once, so that every ``fit`` gets the same."""
    try:
        reader = compat.TFEpochIterator(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=False,
            distribute_strategy=Undistributed,
        )
    except ValueError as error:
        raise TowerError(f"verify could not read the data: {error}") from error
    reader.data_adapter.on_epoch_begin()
    try:
        batches = list(reader._distributed_dataset.take(steps))
    finally:
        reader.data_adapter.on_epoch_end()
    if not batches:
        raise TowerError("verify got no batch: the dataset is empty.")
    number = tf.data.experimental.assert_cardinality(len(batches))
    spec = reader._distributed_dataset.element_spec
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    ).apply(number)


def _logs_of_fit(model: keras.Model, data: tf.data.Dataset) -> _Values:
    """Train a model; return the logs of each step by name."""
    found: _Values = {}

    def note(batch: int, logs: Any = None) -> None:
        for path, value in keras.tree.flatten_with_path(logs or {}):
            name = "/".join(map(str, path))
            found[f"the log {name!r} of step {batch + 1}"] = np.asarray(value)

    noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    # Not the model's own attribute: a model that was made on towers has there
    # what takes it back to them.
    type(model).fit(model, data, callbacks=[noting], verbose=0, shuffle=False)
    return found


def _values(model: keras.Model) -> _Values:
    """Return all variables but those of metrics and of draws, by name."""
    # What these result in is compared.
    found = state.collect(model)
    skipped = {id(v) for v in (*found.seeds, *found.metrics)}
    values: _Values = {}
    for variable in _variables(model):
        if id(variable) not in skipped:
            name = getattr(variable, "path", variable.name)
            while name in values:
                name += "'"
            values[name] = variable.numpy()
    return values


def _differences(one: _Values, other: _Values) -> dict[str, float]:
    """Return the relative differences of what both have, by name."""
    found = {}
    for name in one.keys() & other.keys():
        a, b = (np.asarray(v, "float64") for v in (one[name], other[name]))
        found[name] = 0.0
        if a.shape != b.shape:
            found[name] = math.inf
        elif not np.array_equal(a, b, equal_nan=True):
            size = np.max(np.abs(a - b)) / np.max(np.abs([a, b]))
            found[name] = float(size) if np.isfinite(size) else math.inf
    return found


def _change_last_bits(model: keras.Model) -> None:
    """Change weights by a unit in the last place, up and down by turns."""
    types = {layer.compute_dtype for layer in model._flatten_layers()}
    floats = [name for name in types if tf.as_dtype(name).is_floating]
    unit = max(float(ml_dtypes.finfo(name).eps) for name in floats)
    for variable in model.trainable_variables:
        value = variable.numpy()
        signs = 1 - 2 * (np.arange(value.size).reshape(value.shape) % 2)
        variable.assign(value * (1 + unit * signs).astype(value.dtype))


def _build(model: keras.Model, data: tf.data.Dataset) -> None:
    """Build a model by a step, and leave the values it begins with."""
    made: list[tuple[Any, Any]] = []

    def note(create: Any, **kwargs: Any) -> Any:
        variable = create(**kwargs)
        if tf.executing_eagerly():
            made.append((variable, variable.numpy()))
        return variable

    with _left_as_it_was(model):
        try:
            with tf.variable_creator_scope(note):
                _logs_of_fit(model, data)
        finally:
            for variable, value in made:
                variable.assign(value)


def _variables(model: keras.Model) -> list[Any]:
    """Return all variables of a model and its training, each once."""
    found: list[Any] = state.collect(model).everything()
    known = {id(variable._value) for variable in found}

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, tf.Variable) and id(value) not in known:
            known.add(id(value))
            found.append(value)
        elif isinstance(value, dict) and depth:
            visit(list(value.values()), depth)
        elif isinstance(value, (list, tuple)) and depth:
            for item in value:
                visit(item, depth - 1)

    for layer in model._flatten_layers():
        visit(vars(layer), 3)
    return found


@contextlib.contextmanager
def _left_as_it_was(model: keras.Model) -> Iterator[None]:
    """Put variables, attributes and random states back after a block."""
    values = [(variable, variable.numpy()) for variable in _variables(model)]
    # What a layer sets when it is built stays.
    parts = [part for part in model._flatten_layers() if part.built]
    for layer in model._flatten_layers():
        names = ("_loss_tracker", "_compile_metrics", "_compile_loss")
        parts += [p for n in names if (p := getattr(layer, n, None))]
    parts += [*state.collect(model).optimizers, *model.metrics]
    parts += [vars(p)["_tracker"] for p in parts if "_tracker" in vars(p)]
    before = [(part, attributes.attributes_of(part)) for part in parts]
    of_fit = {n: vars(model)[n] for n in _OF_FIT if n in vars(model)}
    put_draws_back = attributes.python_draws()
    seeds = compat.get_global_attribute("global_seed_generator")
    operations = getattr(compat.eager_context(), "_rng", None)
    drawn = operations and operations.getstate()
    try:
        yield
    finally:
        with blocks.interrupts_deferred():
            for variable, value in values:
                variable.assign(value)
            for part, found in before:
                attributes.put_back(part, found)
            for name in _OF_FIT:
                vars(model).pop(name, None)
            vars(model).update(of_fit)
            put_draws_back()
            compat.set_global_attribute("global_seed_generator", seeds)
            if operations:
                operations.setstate(drawn)
