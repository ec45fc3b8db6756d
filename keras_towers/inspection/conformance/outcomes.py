"""Trains a model on one device and on towers, and compares the results.

A case may have a tolerance of its own, in ``cases.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.weights.model_binding import strategy_that_runs
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.foundation.object_types import Structure
from keras_towers.strategies.base import BaseStrategy

TOLERANCE = 2e-6


def assert_close(
    found: Structure,
    wanted: Structure,
    tolerance: float = TOLERANCE,
    message: str = "",
) -> None:
    """Assert that arrays or numbers differ by no more than the tolerance."""
    np.testing.assert_allclose(
        found, wanted, rtol=tolerance, atol=tolerance, err_msg=message
    )


def assert_towers_equal(
    model: keras.Model, variables: Iterable[keras.Variable] | None = None
) -> None:
    """Assert that all towers hold the same weights, to the last bit.

    Args:
        model: the model.
        variables: other variables to compare.
    """
    for variable in variables or model.trainable_variables:
        first, *others = getattr(variable._value, "values", [variable._value])
        for index, other in enumerate(others, 1):
            np.testing.assert_array_equal(
                first.numpy(),
                other.numpy(),
                err_msg=f"{variable.path} on tower {index}",
            )


@dataclasses.dataclass
class Outcome:
    """The result of using a model.

    Attributes:
        model: the model, off the towers.
        returned: what was returned; of a ``History`` its dict.
        values: all variables afterwards, as pairs of path and value.
    """

    model: keras.Model
    returned: Structure
    values: list[tuple[str, np.ndarray]]


def use_model(
    make: Callable[[], keras.Model],
    act: Callable[[keras.Model], Structure],
    strategy: BaseStrategy | None = None,
    eagerly: bool = False,
) -> Outcome:
    """Use a new model, on one device or on towers.

    On towers, all of them end with the same weights, and the model is an
    ordinary one afterwards, with the variables that it had.

    Args:
        make: makes a compiled model, the same every time.
        act: uses the model.
        strategy: the towers; None: one device.
        eagerly: whether to run it eagerly, which takes less than to trace it.
    """
    model = make()
    if eagerly:
        model.run_eagerly = True
    originals = Originals(model) if model.built else None
    # The same draws for shuffled data, whatever came before.
    keras.utils.set_random_seed(11)
    with strategy or contextlib.nullcontext():
        returned = act(model)
        if strategy is not None:
            assert_towers_equal(model)
    assert_ordinary(model)
    if originals is not None:
        originals.assert_back()
    returned = getattr(returned, "history", returned)
    return Outcome(model, returned, values_of(model))


def assert_same(
    found: Outcome, wanted: Outcome, tolerance: float = TOLERANCE
) -> None:
    """Assert that two uses of a model returned and left the same."""
    tf.nest.assert_same_structure(found.returned, wanted.returned)
    if isinstance(wanted.returned, Mapping):
        for name, values in wanted.returned.items():
            assert_close(found.returned[name], values, tolerance, name)
    elif wanted.returned is not None:
        tf.nest.map_structure(
            lambda a, b: assert_close(a, b, tolerance),
            found.returned,
            wanted.returned,
        )
    assert_same_values(found.values, wanted.values, tolerance)


def values_of(model: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Paths and values of all variables of a model."""
    return [(v.path, v.numpy()) for v in all_variables(model)]


def assert_same_values(
    found: Sequence[tuple[str, np.ndarray]],
    wanted: Sequence[tuple[str, np.ndarray]],
    tolerance: float,
) -> None:
    """Assert that variables are the same in order; names may differ."""
    for (path, value), (other, reference) in zip(found, wanted, strict=True):
        assert_close(value, reference, tolerance, f"{path} {other}")


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers among the attributes of a model, wrapped ones too."""
    kind = keras.optimizers.Optimizer
    own = [value for value in vars(model).values() if isinstance(value, kind)]
    inner = [getattr(item, "inner_optimizer", None) for item in own]
    return own + [item for item in inner if item is not None]


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Weights, optimizers, metrics, seeds: not by keras_towers's own search."""
    variables = list(model.variables)
    for optimizer in optimizers(model):
        variables += optimizer.variables
    for metric in model.metrics:
        variables += metric.variables
    for layer in model._flatten_layers():
        variables += [g.state for g in getattr(layer, "_seed_generators", ())]
    return list({id(variable): variable for variable in variables}.values())


class Originals:
    """The ``tf.Variable`` objects of a model, to be found again."""

    def __init__(self, model: keras.Model):
        self.model = model
        self.held: list[tuple[keras.Variable, tf.Variable]] = [
            (v, v._value) for v in all_variables(model)
        ]

    def assert_back(self) -> None:
        """Assert that the model is an ordinary one, with the same variables."""
        assert_ordinary(self.model)
        for variable, value in self.held:
            require(variable._value is value, variable.path)


def assert_ordinary(model: keras.Model, trains_on_towers: bool = False) -> None:
    """Assert that nothing of a strategy is left in the model.

    Args:
        model: the model.
        trains_on_towers: it was made in a block, and trains on its towers.
    """
    default = tf.distribute.get_strategy()
    require(not tf.distribute.has_strategy(), "a strategy is still entered")
    for variable in all_variables(model):
        if spans_ranks(variable):
            # Until all ranks read it, each has its part.
            variable.numpy()
        value, path = variable._value, variable.path
        ours = isinstance(value, tf.distribute.DistributedValues)
        require(isinstance(value, tf.Variable) and not ours, path)
        for holder in (value, value.handle):
            require(not hasattr(holder, "_distributed_container"), path)
    for optimizer in optimizers(model):
        require(optimizer._distribution_strategy is default, optimizer.name)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            require(layer._distribute_strategy is None, layer.name)
            trains = bool(strategy_that_runs(layer, "fit"))
            require(trains == trains_on_towers, layer.name)
            require("_make_function" not in vars(layer), layer.name)


def require(condition: bool, name: str) -> None:
    """Raise an error about a part of a model that is still on the towers."""
    if not condition:
        raise AssertionError(f"{name} is not as it was before the block")
