"""Runs a function as soon as Keras is imported, and imports nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_keras(then: Callable[[], None]) -> None:
    """Call a function now if Keras is imported, else right after its import.

    Args:
        then: the function; called once.
    """
    if "keras" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterKeras(then))


class _AfterKeras(MetaPathFinder):
    """Lets the other finders find Keras, and adds a call to its import."""

    def __init__(self, then: Callable[[], None]):
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "keras":
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._extend(spec)
                return spec
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            # A search without an import gets here too, but never calls this.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = execute_and_call  # type: ignore[method-assign]
