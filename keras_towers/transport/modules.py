"""Importing the module of an engine that is built for one TensorFlow."""

from __future__ import annotations

import importlib
from types import ModuleType

import tensorflow as tf

from keras_towers.errors import TowerError


def load(name: str, title: str) -> ModuleType:
    """Import ``name.tensorflow``, or raise an error with instructions.

    Args:
        name: of the engine's package, as ``keras-towers install`` knows it.
        title: its display name.

    Raises:
        TowerError: it is not installed, or not for this TensorFlow.
    """
    install = f"run `keras-towers install {name}`"
    try:
        return importlib.import_module(f"{name}.tensorflow")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise TowerError(
            f"{title} is not installed in this environment: {install}."
        ) from error
    except (ImportError, OSError, tf.errors.NotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TowerError(
            f"{title} does not load with TensorFlow {tf.__version__}; it was "
            f"probably built for another version, or on another machine: "
            f"{install} to build it for this one. (The error was: {reason})"
        ) from error
