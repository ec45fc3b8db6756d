"""The module of an engine, for code of one's own."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError


class Engine:
    """An engine's module, with the names that every engine has here.

    Code that was written for Horovod asks ``hvd.rank()`` and ``hvd.size()``;
    with ``hvd = strategy.engine`` it runs on BytePS, too. Whatever else the
    module has can be asked for as well.

    Args:
        module: ``horovod.tensorflow`` or ``byteps.tensorflow``.

    Attributes:
        module: the module itself.

    Example:
        >>> hvd = kt.BytePSStrategy().engine
        >>> hvd.rank(), hvd.size(), hvd.mpi_enabled()
        (0, 1, False)
    """

    def __init__(self, module: ModuleType):
        self.module = module

    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self.module.rank()

    def size(self) -> int:
        """The number of processes."""
        return self.module.size()

    def mpi_enabled(self) -> bool:
        """Whether the engine runs over MPI."""
        enabled = getattr(self.module, "mpi_enabled", lambda: False)
        return bool(enabled())

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # Not yet there, as while it is copied.
            raise AttributeError(name)
        return getattr(self.module, name)


def load(name: str, title: str) -> ModuleType:
    """Import ``name.tensorflow``, or raise an error with instructions.

    Args:
        name: of the engine's package, as ``keras-towers install`` knows it.
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
