"""A measurement: how far training on towers is from one device."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers.errors import TowerError
from keras_towers.fit import contract
from keras_towers.fit.context import blocks
from keras_towers.fit.data.iterator import Undistributed
from keras_towers.fit.weights import model_binding, model_state
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.tower import TowerStrategy

# What rounding alone changes by more is not determined on one device either,
# such as a bias before BatchNormalization, whose gradient is all rounding.
_DETERMINED = 0.01
# The generator of draws without a seed, and the last names that layers got.
_GLOBALS = ("global_seed_generator", "object_name_uids")
_KERAS_OBJECTS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    compat.Tracker,
)


@dataclasses.dataclass(frozen=True)
class Verification:
    """How far a few steps on towers are from the same on one device.

    Attributes:
        where: the weight, optimizer variable or log of a step that differs
            most.
        difference: its largest difference, relative to its largest number.
        rounding: by how much it differs on one device alone, if in each step
            the weights are one unit in the last place away.
        steps: the number of steps that were compared.
        description: what the strategy says of itself.

    Example:
        >>> print(keras_towers.verify(model, x, y))
        After 3 steps the largest relative difference from one device is
        1.2e-07, in dense/kernel (6.0e-08 by rounding alone).
        TowerStrategy: 2 towers (/device:CPU:0 to /device:CPU:1)
          ...
    """

    where: str
    difference: float
    rounding: float
    steps: int
    description: str

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"After {steps} the largest relative difference from one device "
            "is\n"
            f"{self.difference:.1e}, in {self.where} ({self.rounding:.1e} by "
            f"rounding alone).\n{self.description}"
        )


def verify(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    strategy: Any = None,
    batch_size: int | None = None,
    steps: int = 3,
) -> Verification:
    """Measure how far training on towers is from training on one device.

    ``fit`` runs a few steps on one device and on towers, on the same batches
    and from the same weights, and what results is compared. What one device
    itself does not determine, because rounding changes it, is left out.

    Afterwards the model is as it was. A generator loses the batches that were
    drawn.

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
            data, or ``steps`` is invalid. What ``fit`` raises is raised.
    """
    if (devices.as_whole_number(steps) or 0) < 1:
        raise TowerError(f"steps={steps!r}: give a whole number, 1 or more.")
    _check(model)
    strategy = TowerStrategy() if strategy is None else strategy
    given = (x, y, sample_weight, batch_size)
    data = _first_batches(compat.TFEpochIterator(Undistributed, *given), steps)
    one = _results(model, data)
    near = _results(model, data, before_step=_change_last_bits)
    other = _results(model, data, strategy)
    found, rounding = _differences(one, other), _differences(one, near)
    determined = [n for n in found if rounding[n] <= _DETERMINED] or [*found]
    where = max(determined, key=lambda name: found[name])
    sizes = found[where], rounding[where]
    count = int(data.cardinality())
    return Verification(where, sizes[0], sizes[1], count, strategy.describe())


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model) or not model.compiled:
        raise TowerError(f"verify takes a compiled keras.Model, not {model!r}.")
    inside = tf.distribute.has_strategy()
    if not inside:
        model_binding.release_from_home(model)
    if inside or contract.home_of(model) is not None:
        what = "was called in a strategy's scope, or its model is on one"
        raise TowerError(f"verify {what}: call it before the `with` block.")


def _first_batches(reader: Any, steps: int) -> tf.data.Dataset:
    """Read batches once, so that every ``fit`` gets the same."""
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


def _results(
    model: keras.Model,
    data: tf.data.Dataset,
    strategy: BaseStrategy | None = None,
    before_step: Callable[[keras.Model], None] = lambda model: None,
) -> dict[str, Any]:
    """Return the logs of each step of ``fit``, and all variables after it."""
    found: dict[str, Any] = {}

    def note(batch: int, logs: Any = None) -> None:
        for path, value in keras.tree.flatten_with_path(logs or {}):
            name = "/".join(map(str, path))
            found[f"the log {name!r} of step {batch + 1}"] = value

    noting = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: before_step(model),
        on_train_batch_end=note,
    )
    with _left_as_it_was(model):
        with strategy or contextlib.nullcontext():
            # Not the attribute of a model that was made on towers, which takes
            # it back to them.
            options: Any = {"verbose": 0, "shuffle": False}
            type(model).fit(model, data, callbacks=[noting], **options)
        # State of metrics and of draws is not compared: what it results in is.
        all_of = model_state.collect(model)
        skipped = {id(v) for v in (*all_of.seeds, *all_of.metrics)}
        for variable in _variables(model):
            name = getattr(variable, "path", variable.name)
            while name in found:
                name += "'"
            if id(variable) not in skipped:
                found[name] = variable.numpy()
    return found


def _differences(
    one: dict[str, Any], other: dict[str, Any]
) -> dict[str, float]:
    """Return the relative differences of what both have, by name."""
    found = {}
    for name in filter(other.__contains__, one):
        a, b = (np.asarray(v, "float64") for v in (one[name], other[name]))
        same = np.array_equal(a, b, equal_nan=True)
        size = 0.0 if same else np.max(np.abs(a - b)) / np.max(np.abs([a, b]))
        found[name] = float(size) if np.isfinite(size) else np.inf
    return found


def _change_last_bits(model: keras.Model) -> None:
    """Change weights by a unit in the last place, up and down by turns."""
    types = {layer.compute_dtype for layer in compat.layers_of(model)}
    floats = filter(lambda name: tf.as_dtype(name).is_floating, types)
    unit = max(float(ml_dtypes.finfo(name).eps) for name in floats)
    for variable in model.trainable_variables:
        value = variable.numpy()
        signs = 1 - 2 * (np.arange(value.size).reshape(value.shape) % 2)
        variable.assign(value * (1 + unit * signs).astype(value.dtype))


def _variables(model: keras.Model) -> list[Any]:
    """Return all variables of a model and its training."""
    plain = [v for v in _reachable([model]) if isinstance(v, tf.Variable)]
    return [*model_state.collect(model).everything(), *plain]


@contextlib.contextmanager
def _left_as_it_was(model: keras.Model) -> Iterator[None]:
    """Put variables, attributes and random states back after a block."""
    values = [(variable, variable.numpy()) for variable in _variables(model)]
    keras_globals = [*map(compat.get_global_attribute, _GLOBALS)]
    objects = [*_reachable([model, *model.metrics, *keras_globals])]
    contents = [(one, _content_of(one)) for one in objects]
    arrays = [(a, a.copy()) for a in objects if isinstance(a, np.ndarray)]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with blocks.interrupts_deferred():
            for variable, value in values:
                variable.assign(value)
            for one, content in contents:
                if _identities(_content_of(one)) != _identities(content):
                    _put_back(one, content)
            for array, value in arrays:
                if array.flags.writeable:
                    array[...] = value
            for name, value in zip(_GLOBALS, keras_globals, strict=True):
                compat.set_global_attribute(name, value)
            random.setstate(python)
            np.random.set_state(numpy)


class _Content(NamedTuple):
    """Copies of an object's attributes, and of its items if it has any."""

    attributes: dict[str, Any]
    items: dict[Any, Any]


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield what Keras's objects and containers hold, each object once."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            content = _content_of(value)
            waiting += content.attributes.values()
            waiting += content.items.values()


def _content_of(value: Any) -> _Content:
    plain = _unwrapped(value)
    items = {}
    if isinstance(plain, dict):
        items = dict(plain)
    elif isinstance(plain, (list, tuple, set, collections.deque)):
        items = dict(enumerate(plain))
    elif not isinstance(value, _KERAS_OBJECTS):
        return _Content({}, {})
    return _Content(dict(getattr(value, "__dict__", {})), items)


def _identities(content: _Content) -> list[list[tuple[Any, int]]]:
    return [[(key, id(v)) for key, v in part.items()] for part in content]


def _put_back(value: Any, content: _Content) -> None:
    """Restore attributes and items, without a ``__setattr__`` or tracking."""
    if content.attributes or getattr(value, "__dict__", None):
        vars(value).clear()
        vars(value).update(content.attributes)
    plain = _unwrapped(value)
    items = content.items.values()
    if isinstance(plain, collections.OrderedDict):
        collections.OrderedDict.clear(plain)
        collections.OrderedDict.update(plain, content.items)
    elif isinstance(plain, dict):
        dict.clear(plain)
        dict.update(plain, content.items)
    elif isinstance(plain, list):
        list.__setitem__(plain, slice(None), items)
    elif isinstance(plain, set):
        set.clear(plain)
        set.update(plain, items)
    elif isinstance(plain, collections.deque):
        plain.clear()
        plain.extend(items)


def _unwrapped(value: Any) -> Any:
    """Return the dictionary that TensorFlow wraps, or the value."""
    wrapped = getattr(value, "__wrapped__", None)
    return wrapped if isinstance(wrapped, dict) else value
