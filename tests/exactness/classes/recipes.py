"""Recipes, and the data that they share."""

import inspect
from dataclasses import dataclass, field

import keras
import numpy as np
from keras import layers

from keras_towers.foundation import compat

# Batches of 8 and 3: no number of towers divides both evenly.
EXAMPLES, BATCH = 11, 8

# Names of Keras that have no recipe, and the reasons.
NO_PART = {
    "InputLayer": "every functional model has one",
    "InputSpec": "describes inputs",
    "Layer": "the base class",
    "Wrapper": "the base class of layers around layers",
    "FlaxLayer": "runs on JAX only",
    "JaxLayer": "runs on JAX only",
    "TorchModuleWrapper": "runs on PyTorch only",
    "Loss": "the base class",
    "Metric": "the base class",
    "Optimizer": "the base class",
    "OptimizerMap": "describes optimizers",
}
if compat.KERAS < (3, 10):
    NO_PART["TFSMLayer"] = "Keras fails to train it on one device"


@dataclass(frozen=True)
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
    """

    x: np.ndarray
    build: object
    trained: str | None = None
    y: np.ndarray | None = None
    compiled: dict = field(default_factory=dict)
    weighted: bool = False


def _random():
    return np.random.default_rng(7)


def floats(*shape):
    """Numbers around zero, of shape [examples, ...]."""
    return _random().normal(size=(EXAMPLES, *shape)).astype("float32")


def fractions(*shape):
    """Numbers in [0, 1)."""
    return _random().random(size=(EXAMPLES, *shape)).astype("float32")


def integers(below, *shape, least=0):
    """Integers from ``least``."""
    drawn = _random().integers(least, below, size=(EXAMPLES, *shape))
    return drawn.astype("int32")


def words(*shape):
    """Strings of a small vocabulary."""
    return np.array(["a", "b", "c d", "e"])[integers(4, *shape)]


def one_hot(classes):
    """One class for each example."""
    return np.eye(classes, dtype="float32")[integers(classes)]


def head(tensor, units=1, activation=None):
    """Make one row of ``units`` numbers for each example."""
    return layers.Dense(units, activation)(layers.Flatten()(tensor))


def by_name(*rows):
    """Rows as a dict: by each of the names that a row begins with."""
    return {
        name: rest[0] if len(rest) == 1 else rest
        for names, *rest in rows
        for name in names.split()
    }


def parameters(cls):
    return inspect.signature(cls.__init__).parameters


def taken(cls, values):
    """Those of some values that a class has parameters for, by name."""
    return {k: v for k, v in values.items() if k in parameters(cls)}


def public(namespace):
    """The classes of a public module of Keras, with all their names.

    Args:
        namespace: such as ``"layers"``.
    """
    found = {}
    for name, value in vars(getattr(keras, namespace)).items():
        if isinstance(value, type):
            found.setdefault(value, []).append(name)
    return found


def there(namespace, recipes):
    """Those recipes whose classes the installed Keras has, and trains."""
    classes = {*vars(getattr(keras, namespace))} - {*NO_PART}
    return {name: value for name, value in recipes.items() if name in classes}
