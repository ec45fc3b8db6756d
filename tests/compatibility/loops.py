"""Custom training loops, on one device or on a strategy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, GLOBAL_BATCH, EPOCHS = 20, 8, 2

# How a step is run: by hand, traced for each replica, or traced as a whole
# with the strategy inside, a step or an epoch at a time.
STYLES = ("eager", "replica function", "step function", "epoch function")


def dense_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(
                4, activation="tanh", kernel_constraint="max_norm"
            ),
            keras.layers.Dense(2),
        ]
    )


def sparse_model() -> keras.Model:
    """Its gradients are ``tf.IndexedSlices``."""
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Embedding(5, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def data(model: keras.Model) -> tf.data.Dataset:
    """Batches of 8, 8 and 4 examples; sums over them are far from equal."""
    random = np.random.default_rng(3)
    x = random.normal(size=(EXAMPLES, 3)).astype("float32")
    if any(isinstance(layer, keras.layers.Embedding) for layer in model.layers):
        x = random.integers(0, 5, (EXAMPLES, 3))
    y = random.normal(size=(EXAMPLES, 2)).astype("float32")
    y *= np.linspace(0.1, 3.0, EXAMPLES, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)


@dataclasses.dataclass
class Outcome:
    """What a loop leaves behind."""

    losses: list[float]
    weights: list[np.ndarray]
    optimizer: list[np.ndarray]
    model: keras.Model


def train(
    strategy: tf.distribute.Strategy | None,
    make_optimizer: Callable[[], Any],
    style: str = "step function",
    make_model: Callable[[], keras.Model] = dense_model,
    build_first: bool = False,
) -> Outcome:
    """Train by hand as TensorFlow's guide does.

    Args:
        strategy: None for one device.
        make_optimizer: called in the strategy's scope.
        style: one of ``STYLES``.
        make_model: called in the strategy's scope.
        build_first: build the optimizer, instead of letting its first use do.
    """
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        model, optimizer = make_model(), make_optimizer()
        if build_first:
            optimizer.build(model.trainable_variables)
    # As on one device where there is no strategy.
    strategy = strategy or tf.distribute.get_strategy()
    losses = loop(strategy, model, optimizer, style)
    return outcome(model, optimizer, losses)


def outcome(model, optimizer, losses) -> Outcome:
    return Outcome(
        losses,
        [v.numpy() for v in model.variables],
        [v.numpy() for v in optimizer.variables],
        model,
    )


def loop(strategy, model, optimizer, style) -> list[float]:
    """Train for some epochs; returns the sum of the losses of each."""
    variables = model.trainable_variables

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=1)
            loss = tf.reduce_sum(errors) / GLOBAL_BATCH
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    if style == "replica function":
        replica_step = tf.function(replica_step)

    def step(batch):
        each = strategy.run(replica_step, (batch,))
        return strategy.reduce("SUM", each, axis=None)

    if style == "step function":
        step = tf.function(step)

    def epoch(batches):
        total = tf.constant(0.0)
        for batch in batches:
            total += step(batch)
        return total

    if style == "epoch function":
        epoch = tf.function(epoch)
    distributed = strategy.experimental_distribute_dataset(data(model))
    return [float(epoch(distributed)) for _ in range(EPOCHS)]
