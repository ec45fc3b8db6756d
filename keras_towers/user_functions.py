"""Functions that users name on the command line, as MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from keras_towers.errors import TowerError


def split(target: str) -> tuple[str, str]:
    """Return the names of the module and of the function in it.

    Raises:
        TowerError: one of them is missing.
    """
    module, colon, function = target.partition(":")
    if not (module and colon and function):
        raise TowerError(
            f"{target!r} names no function: give MODULE:FUNCTION, such as "
            "my_module:build"
        )
    return module, function


def call(target: str) -> Any:
    """Import a function, also from the current folder, and call it.

    Raises:
        TowerError: there is no such function, or it fails.

    Example:
        >>> model, x, y = user_functions.call("my_module:build")
    """
    module, name = split(target)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TowerError(f"{target} cannot be imported: {error}") from error
    try:
        return function()
    except Exception as error:
        raise TowerError(
            f"{target} failed: {type(error).__name__}: {error}"
        ) from error
