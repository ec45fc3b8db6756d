"""Models and references on one device that take little."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tests.kit.training import adam, fit, linear


def two_layers(
    optimizer: Callable[[], Any] = adam, **options: Any
) -> keras.Model:
    """A classifier of which a part can be frozen."""
    # The layer draws its seed when it is created.
    keras.utils.set_random_seed(1)
    return linear(keras.layers.Dense(4), optimizer=optimizer, **options)


@functools.cache
def trained(fits: int = 1) -> keras.Model:
    """``linear()`` after so many calls of ``fit``, to compare with only.

    Its ``history`` is that of the last one.
    """
    model = linear(run_eagerly=True)
    for _ in range(fits):
        fit(model)
    return model
