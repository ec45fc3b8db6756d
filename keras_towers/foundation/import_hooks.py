"""Hooks into Python's imports.

Versions are checked before any module that needs TensorFlow is imported, some
modules have second names, and functions are called after Keras is imported.
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
from typing import Any

import wrapt

from keras_towers.foundation.errors import CompatibilityError, TowerError

# The modules that work without TensorFlow; all others import it.
_INDEPENDENT = re.compile(
    r"(cli|jobs(?!\.launching\.late_entry))(\..+)?"
    r"|engines(\.(?!dropin)\w+(\.(dmlc|\w+_recipe|\w+_servers))?)?"
    r"|foundation(\.(?!compat|tf_strategy)\w+)?"
    r"|inspection(\.(bench(\..+)?|user_models))?"
    r"|parameter_servers(\.server_tasks)?|fit(\.(options|given_values))?"
    r"|strategies|__main__"
)


def check_tensorflow() -> None:
    """Raise ``CompatibilityError`` without TensorFlow or its backend."""
    if importlib.util.find_spec("tensorflow") is None:
        raise CompatibilityError(
            "keras_towers needs TensorFlow, which is not installed. Install "
            "it with an extra: keras-towers[cpu], or keras-towers[gpu] on a "
            "machine with NVIDIA GPUs (in a checkout: pip install '.[cpu]')."
        )
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if "keras" in sys.modules:
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise CompatibilityError(
            f"keras_towers needs Keras's TensorFlow backend, but Keras uses "
            f"{backend!r}. Set KERAS_BACKEND=tensorflow before you "
            "import Keras."
        )


def packages(module: str) -> dict[str, str]:
    """Return the installed packages with a module, and their versions."""
    names = metadata.packages_distributions().get(module, [])
    # Names of packages may be written with underscores.
    return {
        name.lower().replace("_", "-"): metadata.version(name) for name in names
    }


def minor_version(version: str) -> tuple[int, ...]:
    """Return the numbers of a release that decide whether it is compatible."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def load_entry(entry: metadata.EntryPoint, role: str) -> Any:
    """Import an object that another package adds by an entry point.

    Args:
        entry: the entry point.
        role: what it adds, for messages: ``"strategy"``.

    Raises:
        TowerError: it cannot be imported.
    """
    try:
        return entry.load()
    except CompatibilityError:
        raise
    except Exception as error:
        cause = f"cannot be imported ({type(error).__name__}: {error})"
        raise broken_entry(entry, role, cause) from error


def broken_entry(
    entry: metadata.EntryPoint, role: str, cause: str
) -> TowerError:
    """Return an error that names the package of an entry point."""
    package = entry.dist.name if entry.dist else "keras_towers"
    return TowerError(
        f"the {role} {entry.name!r} of the package {package} cannot be used: "
        f"its entry point {entry.value!r} {cause}. Fix or uninstall that "
        "package."
    )


def find_modules(
    second_names: Mapping[str, str], on_foreign: Callable[[str], None]
) -> None:
    """Check every import of a module of this package that needs TensorFlow.

    Args:
        second_names: maps a name that users import to the module that it stands
            for, or to another second name.
        on_foreign: called with each imported second name of another package.
    """
    sys.meta_path.insert(0, _Finder(second_names, on_foreign))


class _Finder(MetaPathFinder):
    """A finder that Python consults first, for every module."""

    def __init__(
        self, second_names: Mapping[str, str], on_foreign: Callable[[str], None]
    ):
        self._second_names = second_names
        self._on_foreign = on_foreign

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        is_own = package == __name__.partition(".")[0]
        if is_own and not _INDEPENDENT.fullmatch(name):
            check_tensorflow()
            # Functions given to ``after_keras`` import such modules. If one of
            # these modules imported Keras first, it would be found half
            # imported.
            importlib.import_module("keras")
        outer, _, inner = fullname.rpartition(".")
        original = self._second_names.get(fullname)
        if original is None and outer in self._second_names:
            original = f"{self._second_names[outer]}.{inner}"
        if original is None:
            return None
        then = None if is_own else self._on_foreign
        return ModuleSpec(fullname, _SecondName(original, then))


class _SecondName(Loader):
    """Loads a module under a second name, as the same object."""

    def __init__(self, original: str, then: Callable[[str], None] | None):
        self._original = original
        self._then = then

    def exec_module(self, module: ModuleType) -> None:
        """Put the original where Python looks for the loaded module."""
        original = importlib.import_module(self._original)
        sys.modules[module.__name__] = original
        if self._then:
            self._then(module.__name__)


def after_keras(then: Callable[[], None]) -> None:
    """Call a function once, when Keras is imported, without importing it."""
    wrapt.register_post_import_hook(lambda module: then(), "keras")
