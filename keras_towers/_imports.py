"""Checks before imports that need TensorFlow, and a hook after Keras's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from types import ModuleType

import wrapt

from keras_towers.errors import CompatibilityError

# What works without TensorFlow; all other modules import it.
_INDEPENDENT = re.compile(
    r"(bench|building|cli|doctor|rendezvous)(\..+)?|launching(\.(?!ray).+)?"
    r"|strategies|_imports|__main__|agent|errors|settings|subprocesses"
    r"|system|user_functions"
)


def check() -> None:
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
    found = metadata.packages_distributions().get(module, [])
    # They may be written with underscores.
    return {
        name.lower().replace("_", "-"): metadata.version(name) for name in found
    }


def check_before_imports() -> None:
    """Check before every import of a module that needs TensorFlow."""
    sys.meta_path.insert(0, _Check())


class _Check(MetaPathFinder):
    """A finder that is asked for every module first, and finds none."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> None:
        package, _, name = fullname.partition(".")
        if package == __package__ and not _INDEPENDENT.fullmatch(name):
            check()
            # What ``after_keras`` calls imports such modules. If one of them
            # imported Keras first, it would be found half read.
            importlib.import_module("keras")


def after_keras(then: Callable[[], None]) -> None:
    """Call a function once, when Keras is imported, without importing it."""
    wrapt.register_post_import_hook(lambda module: then(), "keras")
