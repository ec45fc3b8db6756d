"""Small training runs: their data, their models and their ``fit``."""

from collections.abc import Callable
from typing import Any

import keras

import keras_towers as kt
from tests.exactness import models as m

EXAMPLES = 53
BATCH = 16
STEPS = 4  # the last batch has 5 examples
X, Y = m.FEATURES[:EXAMPLES], m.LABELS[:EXAMPLES]


def adam(**kwargs: Any) -> keras.optimizers.Adam:
    return keras.optimizers.Adam(0.01, **kwargs)


def classifier(
    *middle: keras.layers.Layer,
    optimizer: Callable[[], Any] = adam,
    **kwargs: Any,
) -> keras.Model:
    """A built and compiled classifier of ``X``."""
    model = m.mlp(*middle)
    arguments = {"metrics": ["accuracy"], **kwargs}
    model.compile(optimizer(), m.cross_entropy(), **arguments)
    return model


def linear(
    *middle: keras.layers.Layer,
    optimizer: Callable[[], Any] = m.momentum,
    **kwargs: Any,
) -> keras.Model:
    """A built and compiled classifier of ``X`` with little to trace."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), *middle, keras.layers.Dense(3)]
    )
    model.compile(optimizer(), m.cross_entropy(), **kwargs)
    return model


def compiled(
    build: Callable[[], keras.Model] = m.mlp,
    optimizer: Callable[[], Any] = m.momentum,
    loss: Callable[[], Any] = m.cross_entropy,
    metrics: Callable[[], Any] = lambda: ["accuracy"],
    **kwargs: Any,
) -> Callable[[], keras.Model]:
    """A function that builds and compiles a model, the same every time."""

    def make() -> keras.Model:
        model = build()
        model.compile(optimizer(), loss(), metrics=metrics(), **kwargs)
        return model

    return make


def stacked(
    layers: Callable[[], Any],
    shape: tuple[int, ...] = (6,),
    cls: Callable[[Any], keras.Model] = keras.Sequential,
    **options: Any,
) -> Callable[[], keras.Model]:
    """Like ``compiled``, of layers that a function makes, the same each time.

    Their initializers take a seed when they are made.
    """

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        return cls([keras.Input(shape), *layers()])

    return compiled(build, **options)


def fit(
    model: keras.Model,
    epochs: int = 1,
    x: Any = X,
    y: Any = Y,
    batch_size: int = BATCH,
    **kwargs: Any,
) -> dict[str, list[float]]:
    """``fit`` in order; returns the history."""
    return model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **kwargs,
    ).history


def strategy_of(
    towers: int, prefetch: bool = False, **options: Any
) -> kt.TowerStrategy:
    """A strategy that may read ahead as it does to accelerators."""
    strategy = kt.TowerStrategy(towers, **options)
    object.__setattr__(strategy._config, "prefetches_to_towers", prefetch)
    return strategy
