"""Train a case on one device and on towers, and compare everything."""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np

import keras_towers as kt
from keras_towers.fit.weights import state
from tests.exactness.cases import CASES


@dataclasses.dataclass
class Result:
    """What a training run leaves behind."""

    weights: dict[str, np.ndarray]
    optimizer: list[np.ndarray]
    history: dict[str, list[float]]


def result(model: keras.Model, history: Any) -> Result:
    model_state = state.collect(model)
    return Result(
        {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.variables)},
        [v.numpy() for v in model_state.optimizer_variables],
        history.history,
    )


@functools.cache
def on_one_device(name: str) -> Result:
    """The reference: what one device gives."""
    model = CASES[name].build()
    return result(model, CASES[name].fit(model))


def on_towers(
    name: str,
    towers: int,
    spoil: Any = None,
    strategy: Any = kt.TowerStrategy,
    **options,
) -> Result:
    """Train on towers; every tower has to end with the same weights.

    Args:
        name: the case.
        towers: number of towers.
        spoil: called with the model while it is on the towers.
        strategy: the class of the strategy.
        **options: for the strategy.
    """
    model = CASES[name].build()
    with strategy(towers, **options):
        history = CASES[name].fit(model)
        if spoil is not None:
            spoil(model)
        assert_towers_equal(model)
    return result(model, history)


def assert_towers_equal(model: keras.Model) -> None:
    """Every tower holds the same trainable weights, to the last bit."""
    for variable in model.trainable_variables:
        first, *others = getattr(variable._value, "values", [variable._value])
        for index, other in enumerate(others, 1):
            np.testing.assert_array_equal(
                first.numpy(),
                other.numpy(),
                err_msg=f"{variable.path} on tower {index}",
            )


def assert_same(name: str, result: Result) -> None:
    """Weights, optimizer state and ``History`` are those of one device."""
    wanted, tolerance = on_one_device(name), CASES[name].tolerance
    close = functools.partial(
        np.testing.assert_allclose, rtol=tolerance, atol=tolerance
    )
    assert list(result.weights) == list(wanted.weights)
    for path, value in wanted.weights.items():
        if "seed" not in path:
            close(result.weights[path], value, err_msg=path)
    assert len(result.optimizer) == len(wanted.optimizer)
    for value, reference in zip(
        result.optimizer, wanted.optimizer, strict=True
    ):
        close(value, reference, err_msg="optimizer state")
    assert result.history.keys() == wanted.history.keys()
    for key, value in wanted.history.items():
        close(result.history[key], value, err_msg=key)
