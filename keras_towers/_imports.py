"""Hooks into Python's imports.

Versions are checked before any module that needs TensorFlow is imported, some
modules have a second name, and functions are called after Keras is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import wrapt

from keras_towers.errors import CompatibilityError

# The modules that work without TensorFlow; all others import it.
_INDEPENDENT = re.compile(
    r"(bench|building|cli|doctor|launching|rendezvous)(\..+)?"
    r"|engines(\.(?!dropin)\w+(\.(dmlc|\w+_recipe|\w+_servers))?)?"
    r"|strategies|_imports|__main__|agent|commands|errors|settings|system"
)


def check_tensorflow() -> None:
    """Raise ``CompatibilityError`` without TensorFlow or its backend."""
    if importlib.util.find_spec("tensorflow") is None:
        raise CompatibilityError(
            "keras_towers needs TensorFlow, which is not installed. It comes "
            "by an extra: keras-towers[cpu], or keras-towers[gpu] on a machine "
            "with NVIDIA GPUs (in a checkout: pip install '.[cpu]')."
        )
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if "keras" in sys.modules:
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise CompatibilityError(
            f"keras_towers needs Keras's TensorFlow backend, but Keras uses "
            f"{backend!r}. Set KERAS_BACKEND=tensorflow before Keras is "
            "imported."
        )


def packages(module: str) -> dict[str, str]:
    """The installed packages that contain a module, and their versions."""
    names = metadata.packages_distributions().get(module, [])
    # Names of packages may be written with underscores.
    return {
        name.lower().replace("_", "-"): metadata.version(name) for name in names
    }


def find_modules(second_names: Mapping[str, str]) -> None:
    """Check every import of a module of this package that needs TensorFlow.

    Args:
        second_names: maps a name that users import to the module that it stands
            for.
    """
    sys.meta_path.insert(0, _Finder(second_names))


class _Finder(MetaPathFinder):
    """A finder that Python consults first, for every module."""

    def __init__(self, second_names: Mapping[str, str]):
        self._second_names = second_names

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __package__ or _INDEPENDENT.fullmatch(name):
            return None
        check_tensorflow()
        # Functions given to ``after_keras`` import such modules. If one of
        # these modules imported Keras first, it would be found half imported.
        importlib.import_module("keras")
        first, _, inner = name.partition(".")
        original = self._second_names.get(name)
        if original is None and first in self._second_names:
            original = f"{self._second_names[first]}.{inner}"
        if original is None:
            return None
        return ModuleSpec(fullname, _SecondName(f"{package}.{original}"))


class _SecondName(Loader):
    """Loads a module under a second name, as the same object."""

    def __init__(self, original: str):
        self._original = original

    def exec_module(self, module: ModuleType) -> None:
        """Put the original where Python looks for the loaded module."""
        original = importlib.import_module(self._original)
        sys.modules[module.__name__] = original


def after_keras(then: Callable[[], None]) -> None:
    """Call a function once, when Keras is imported, without importing it."""
    wrapt.register_post_import_hook(lambda module: then(), "keras")
