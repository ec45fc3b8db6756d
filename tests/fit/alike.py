"""Do the same on one device and on towers, and compare all that comes out."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.exactness.compare import assert_towers_equal


def classifier(build=m.mlp, optimizer=m.momentum, loss=m.cross_entropy, **rest):
    """A function that builds and compiles a small classifier."""

    def make():
        model = build()
        model.compile(optimizer(), loss(), **{"metrics": ["accuracy"], **rest})
        return model

    return make


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """All weights but the states of random generators."""
    return {
        f"{index} {variable.name}": variable.numpy()
        for index, variable in enumerate(model.variables)
        if "seed" not in variable.path
    }


def outcome(make: Callable, act: Callable, strategy: Any = None) -> tuple:
    """What ``act(model)`` returns, and the weights after it."""
    model = make()
    # The same draws for shuffled data, whatever came before.
    keras.utils.set_random_seed(11)
    with strategy or contextlib.nullcontext():
        result = act(model)
        if strategy is not None:
            assert_towers_equal(model)
    result = getattr(result, "history", result)
    return result, weights_of(model)


def strategy_of(towers: int, prefetch: bool = False, **options):
    """A strategy that may read ahead as it does to accelerators."""
    strategy = kt.TowerStrategy(towers, **options)
    strategy.prefetches_to_towers = prefetch
    return strategy


def assert_alike(
    make: Callable,
    act: Callable,
    strategy: Any,
    reference: Callable | None = None,
    tolerance: float = 3e-6,
) -> None:
    """Assert that towers give what one device gives.

    Args:
        make: gives a compiled model, the same every time.
        act: uses the model on the towers.
        strategy: the towers.
        reference: uses the model on one device; like ``act`` where it is None.
        tolerance: largest difference allowed.
    """
    wanted, wanted_weights = outcome(make, reference or act)
    found, found_weights = outcome(make, act, strategy)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    tf.nest.assert_same_structure(found, wanted)
    tf.nest.map_structure(close, found, wanted)
    # A lazily built model may number its layers differently.
    assert len(found_weights) == len(wanted_weights)
    for name, other in zip(wanted_weights, found_weights, strict=True):
        np.testing.assert_allclose(
            found_weights[other],
            wanted_weights[name],
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )
