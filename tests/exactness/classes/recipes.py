"""What a recipe is, and the data that recipes share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

# Of the batches of 8 the last has 3: no number of towers divides them alike.
EXAMPLES, BATCH = 11, 8

Tensors = Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The smallest part of a model that a class takes part in.

    Attributes:
        x: the part's input, of ``EXAMPLES`` rows; parts of one model share it.
        build: makes the part's output from the ``KerasTensor`` it is given.
        trained: the activation of a dense layer in front of it, whose
            gradients go through what is tried; None: there is none.
        y: its targets; None: only its output counts.
        compiled: what ``compile`` is given for it, by name: ``loss``,
            ``metrics``, ``weighted_metrics``.
        weighted: whether it has sample weights.
        in_graph: why one device must run it in a graph as towers do; empty: it
            does the same without one.
    """

    x: np.ndarray
    build: Callable[[Tensors], Tensors]
    trained: str | None = None
    y: np.ndarray | None = None
    compiled: dict[str, Callable[[], Any]] = dataclasses.field(
        default_factory=dict
    )
    weighted: bool = False
    in_graph: str = ""


def _random() -> np.random.Generator:
    return np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    """Numbers around zero, of shape [examples, ...]."""
    return _random().normal(size=(EXAMPLES, *shape)).astype("float32")


def fractions(*shape: int) -> np.ndarray:
    """Numbers in [0, 1)."""
    return _random().random(size=(EXAMPLES, *shape)).astype("float32")


def integers(below: int, *shape: int, least: int = 0) -> np.ndarray:
    """Integers from ``least``."""
    drawn = _random().integers(least, below, size=(EXAMPLES, *shape))
    return drawn.astype("int32")


def words(*shape: int) -> np.ndarray:
    """Strings of a small vocabulary."""
    return np.array(["a", "b", "c d", "e"])[integers(4, *shape)]


def one_hot(classes: int) -> np.ndarray:
    """One class for each example."""
    return np.eye(classes, dtype="float32")[integers(classes)]


def head(tensor: Tensors, units: int = 1, activation: Any = None) -> Tensors:
    """Make one row of ``units`` numbers for each example."""
    tensor = layers.Flatten()(tensor)
    return layers.Dense(units, activation)(tensor)


def public(namespace: str) -> dict[type, list[str]]:
    """The classes of a public module of Keras, with all their names.

    Args:
        namespace: such as ``"layers"``.
    """
    found: dict[type, list[str]] = {}
    for name, value in vars(getattr(keras, namespace)).items():
        if isinstance(value, type):
            found.setdefault(value, []).append(name)
    return found
