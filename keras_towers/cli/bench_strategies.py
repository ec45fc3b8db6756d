"""The strategies that the benchmark compares, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

MODES = ("cpu", "gpu", "hierarchical", "collective", "nccl")
# Strategies of ours by their names in the registry.
NAMED = ("parameter-server", "async")
OURS = ("towers", *(f"towers-{mode}" for mode in MODES), *NAMED)
STOCK = ("stock-default", "stock-one-device", "stock-hierarchical")
STRATEGIES = ("plain", *STOCK, *OURS)
DEFAULT_STRATEGIES = ("plain", *STOCK, "towers", *NAMED)


@dataclass
class Contender:
    """A compiled model and the context in which to call its ``fit``.

    The mode is the one that a strategy of ours chose: one that was asked for
    and cannot run on these devices is replaced. Asynchronous towers take
    batches in bursts.
    """

    model: Any
    around_fit: AbstractContextManager[Any]
    mode: str | None = None
    asynchronous: bool = False


def make_contender(
    strategy: str, devices: list[str], build: Callable[[], Any]
) -> Contender:
    """Build a model the way that this strategy's users build theirs.

    Args:
        strategy: one of ``STRATEGIES``.
        devices: the TensorFlow devices to train on, one for a tower.
        build: makes and compiles the model.

    Returns:
        The model and what to put around ``fit``.
    """
    if strategy == "plain":
        return Contender(build(), contextlib.nullcontext())
    if strategy in OURS:
        # The model is built outside, as the README shows it.
        towers = make_towers(strategy, devices)
        return Contender(build(), towers, towers.mode, towers.asynchronous)
    stock = _make_stock(strategy, devices)
    with stock.scope():
        return Contender(build(), contextlib.nullcontext())


def make_towers(strategy: str, devices: list[str]) -> Any:
    """Return the strategy of a name in ``OURS``."""
    import keras_towers

    if strategy in NAMED:
        return keras_towers.strategy(strategy, towers=devices)
    mode = strategy.partition("-")[2] or None
    return keras_towers.TowerStrategy(devices, mode=mode)


def _make_stock(strategy: str, devices: list[str]) -> Any:
    import tensorflow as tf

    cross_device_ops = {
        "stock-default": lambda: None,
        "stock-one-device": tf.distribute.ReductionToOneDevice,
        "stock-hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    }[strategy]()
    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=cross_device_ops
    )
