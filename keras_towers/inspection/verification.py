"""``kt.verify``: how far a model's training on towers is from one device."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_towers.fit import components
from keras_towers.fit.calls import model_building
from keras_towers.fit.data.epoch_iterator import (
    TowerEpochIterator,
    Undistributed,
)
from keras_towers.fit.step.reports import step_reports
from keras_towers.fit.weights import model_binding, model_state
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError, described
from keras_towers.foundation.object_types import Logs, Structure, Variable
from keras_towers.foundation.system import defer_interrupts
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.tower import TowerStrategy
from keras_towers.transport import devices

# Variables that rounding alone changes by more are not determined on one device
# either: for example, a bias before BatchNormalization, whose gradient is
# nothing but rounding.
_DETERMINED = 0.01


@dataclasses.dataclass(frozen=True)
class Verification:
    """The difference between some steps on towers and on one device.

    Attributes:
        where: the weight, optimizer variable or log that differs most.
        difference: its largest difference, relative to its largest number.
        rounding: its difference on one device alone, if all weights move by one
            unit in the last place before each step. It is at least that unit,
            since a sum in another order may differ by as much.
        steps: the number of steps that were compared.
        description: the strategy's ``describe()``.
        causes: why one device, as plain Keras, may itself be wrong.

    Example:
        >>> print(keras_towers.verify(model, x, y))
        After 3 steps the largest relative difference from one device is
        1.9e-07, in dense/kernel (7.6e-07 by rounding alone).
        TowerStrategy: 2 towers (/device:CPU:0 to /device:CPU:1)
          ...
    """

    where: str
    difference: float
    rounding: float
    steps: int
    description: str
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        found = (
            f"After {steps} the largest relative difference from one device "
            "is\n"
            f"{self.difference:.1e}, in {self.where} ({self.rounding:.1e} by "
            "rounding alone)."
        )
        return "\n".join((found, *self.causes, self.description))


def verify(
    model: keras.Model,
    x: Structure = None,
    y: Structure = None,
    sample_weight: Structure = None,
    *,
    strategy: Strategy | None = None,
    batch_size: int | None = None,
    steps: int = 3,
) -> Verification:
    """Measure how much training on towers differs from one device.

    This runs a few steps of ``fit`` on one device and on towers, from the same
    weights and on the same batches. Then it compares the results. It leaves out
    variables that rounding alone changes by more than 1 %, even on one device.

    Afterwards, variables and the random generators of Python and NumPy have
    their old values. If the model is not built, this builds it. If ``x`` is a
    generator, this uses up some of its batches.

    Args:
        model: a compiled model.
        x: data, as for ``fit``: arrays, dictionaries, datasets, generators.
        y: targets, as for ``fit``.
        sample_weight: weights of the examples, as for ``fit``.
        strategy: the towers; None: ``TowerStrategy()``.
        batch_size: examples in a batch of arrays, as for ``fit``.
        steps: the number of steps to run, each on one batch.

    Returns:
        The largest difference, where it is, and what rounding alone does there.

    Raises:
        TowerError: the model is not compiled, or is on towers; there is no
            data, or ``steps`` or ``strategy`` is invalid. Errors of ``fit`` are
            not caught.

    Example:
        >>> found = keras_towers.verify(model, x, y)
        >>> found.difference < 10 * found.rounding
        True
    """
    if (devices.as_whole_number(steps) or 0) < 1:
        raise TowerError(f"steps={steps!r}: give a whole number, 1 or more.")
    towers = checked_strategy("verify", model, x, strategy)
    arrays = (x, y, sample_weight, batch_size)
    data = _first_batches(compat.TFEpochIterator(Undistributed, *arrays), steps)
    if not model_state.runs_eagerly(model):
        model_building.make_variables(model, "fit", data.element_spec)
    alone = _run_fit(model, data)
    rounded = _run_fit(model, data, before_step=_change_last_bits)
    divided = _run_fit(model, data, towers)
    missing = sorted(name for name, _ in alone.keys() - divided.keys())
    if missing:
        raise TowerError(
            f"{type(towers).__name__} does not compute {missing[0]}: give a "
            "strategy that trains."
        )
    unit = _last_place(model)
    rounding = {
        key: max(unit, _difference(alone[key], rounded[key])) for key in alone
    }
    differences = {key: _difference(alone[key], divided[key]) for key in alone}
    determined = [key for key in alone if rounding[key] <= _DETERMINED]
    worst = max(determined or alone, key=lambda key: differences[key])
    return Verification(
        where=worst[0],
        difference=differences[worst],
        rounding=rounding[worst],
        steps=int(data.cardinality()),
        description=towers.describe(),
        causes=step_reports.called_once(model),
    )


def checked_strategy(
    caller: str, model: keras.Model, x: Structure, strategy: Strategy | None
) -> BaseStrategy:
    """Check the arguments of a function that tries a model on towers.

    Args:
        caller: the name of the function.
        model: a compiled model, on no strategy.
        x: its data.
        strategy: the towers; None: ``TowerStrategy()``.

    Raises:
        TowerError: it is something else.
    """
    if not isinstance(model, keras.Model) or not model.compiled:
        raise TowerError(
            f"{caller} takes a compiled keras.Model, not {described(model)}."
        )
    inside = tf.distribute.has_strategy()
    if not inside:
        model_binding.release_from_default(model)
    if inside or components.strategy_of(model) is not None:
        what = "was called in a strategy's scope, or its model is on one"
        raise TowerError(f"{caller} {what}: call it before the `with` block.")
    if x is None:
        raise TowerError(f"{caller} got no data: give x, as for fit.")
    strategy = TowerStrategy() if strategy is None else strategy
    if not isinstance(strategy, BaseStrategy):
        raise TowerError(
            f"strategy={strategy!r} is not allowed: give a strategy of "
            "keras_towers, such as TowerStrategy(2)."
        )
    return strategy


def _first_batches(reader: TowerEpochIterator, steps: int) -> tf.data.Dataset:
    """Read batches once, so that every ``fit`` gets the same ones."""
    dataset = reader._distributed_dataset
    reader.data_adapter.on_epoch_begin()
    batches = list(dataset.take(steps))
    reader.data_adapter.on_epoch_end()
    if not batches:
        raise TowerError("verify got no batch: the dataset is empty.")
    again = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=dataset.element_spec
    )
    return again.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _run_fit(
    model: keras.Model,
    data: tf.data.Dataset,
    strategy: BaseStrategy | None = None,
    before_step: Callable[[keras.Model], None] = lambda model: None,
) -> dict[tuple[str, int], np.ndarray]:
    """Return the logs of each step of ``fit``, and all variables after it.

    A key is a name, and a number that distinguishes variables of the same name.
    """
    results: dict[tuple[str, int], np.ndarray] = {}

    def record_logs(batch: int, logs: Logs = None) -> None:
        for path, value in keras.tree.flatten_with_path(logs or {}):
            name = "/".join(map(str, path))
            name = f"the log {name!r} of step {batch + 1}"
            results[name, 0] = np.asarray(value, "float64")

    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: before_step(model),
        on_train_batch_end=record_logs,
    )
    with restored_values(model):
        block = strategy or contextlib.nullcontext()
        with model_binding.ignoring_default_strategy(model), block:
            model.fit(data, callbacks=[recorder], verbose=0, shuffle=False)
        # States of metrics and random draws are compared by their effects.
        state = model_state.collect(model)
        for variable in (*state.weights, *state.optimizer_variables):
            value = np.asarray(variable.numpy(), "float64")
            results[variable.path, id(variable)] = value
    return results


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference, relative to the largest number."""
    if np.array_equal(one, other, equal_nan=True):
        return 0.0
    size = np.max(np.abs(one - other)) / np.max(np.abs([one, other]))
    return float(size) if np.isfinite(size) else np.inf


def _last_place(model: keras.Model) -> float:
    """Return the relative unit in the last place of a model's results."""
    types = {layer.compute_dtype for layer in model._flatten_layers()}
    floats = filter(lambda name: tf.as_dtype(name).is_floating, types)
    return max(float(ml_dtypes.finfo(name).eps) for name in floats)


def _change_last_bits(model: keras.Model) -> None:
    """Change weights by a unit in the last place, alternately up and down."""
    unit = _last_place(model)
    for variable in model.trainable_variables:
        value = variable.numpy()
        signs = 1 - 2 * (np.arange(value.size).reshape(value.shape) % 2)
        variable.assign(value * (1 + unit * signs).astype(value.dtype))


@contextlib.contextmanager
def restored_values(model: keras.Model) -> Iterator[None]:
    """Restore the values of variables and random states after a block."""
    variables: list[Variable] = model_state.collect(model).everything()
    for layer in model._flatten_layers():
        plain = (v for v in vars(layer).values() if isinstance(v, tf.Variable))
        variables.extend(plain)
    values = [(variable, variable.numpy()) for variable in variables]

    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with defer_interrupts():
            for variable, value in values:
                variable.assign(value)
            random.setstate(python)
            np.random.set_state(numpy)
