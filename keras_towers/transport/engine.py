"""The module of an engine, for code of one's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any


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
