"""Steps of somebody who does not know what the analysis can prove.

``splits``: the towers' results add up to those of one device, and nothing is
to be said. ``couples``: examples meet, and a message names the line that ends
with ``# here`` (or says what the case says), unless it is made equal anyway.
``by_design``: random numbers and statistics that differ without ``exact=True``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases import table

# Two whole batches and a last one, none of which three towers share evenly.
EXAMPLES, BATCH, WIDTH = 33, 14, table.WIDTH

SPLITS = "splits"
COUPLES = "couples"


def generator() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return generator().normal(size=(EXAMPLES, *shape)).astype("float32")


def whole(upto: int, *shape: int) -> np.ndarray:
    return generator().integers(0, upto, (EXAMPLES, *shape)).astype("int32")


def numbers() -> Any:
    return normal(WIDTH), normal(1)


CASES: dict[str, table.Case] = {}
splits = table.registering(CASES, SPLITS, numbers)
couples = table.registering(CASES, COUPLES, numbers)
by_design = table.registering(CASES, table.BY_DESIGN, numbers)


def classes() -> Any:
    return normal(WIDTH), whole(3, 1)


def binary() -> Any:
    return normal(WIDTH), whole(2, 3).astype("float32")


def tokens() -> Any:
    return whole(9, 8), normal(1)


def series() -> Any:
    return normal(7, 3), normal(1)


def images() -> Any:
    return normal(6, 6, 2), normal(1)


def masks() -> Any:
    """Small images, and which of two classes each pixel has."""
    return normal(6, 6, 2), whole(2, 6, 6, 1).astype("float32")


def functional(
    body: Callable[[Any], Any],
    shape: Any = (WIDTH,),
    dtype: str | None = None,
    **options: Any,
) -> keras.Model:
    """Train what a function makes of one input."""
    entrance = keras.Input(shape, dtype=dtype)
    return table.compiled(keras.Model(entrance, body(entrance)), **options)


def sub(
    train: Callable[[Any, Any, Any], Any],
    layers: Callable[[Any], None],
    call: Callable[..., Any] | None = None,
    **options: Any,
) -> keras.Model:
    """Train a model of any layers by any step."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layers(self)

        def call(self, x: Any, training: bool = False) -> Any:
            return call(self, x) if call else x

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return train(self, x, y)

    return table.compiled(Net(), **options)


def dense(units: int, activation: Any = None, **options: Any) -> Any:
    return keras.layers.Dense(units, activation, **options)


def by_loss(of: Callable[[Any, Any, Any], Any], outputs: int = 1) -> Any:
    """Train by a loss of features, targets and outputs."""

    def step(net: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = of(x, y, net(x, training=True))
        return table.apply(net, tape, loss)

    return table.stepped(step, outputs)


def own(call: Callable[..., Any], **options: Any) -> keras.layers.Layer:
    """Make a layer of a function; it is traced anew for every tower."""

    class Own(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return call(x)

    return Own(**options)


def rows(t: Any) -> Any:
    return tf.shape(t)[0]
