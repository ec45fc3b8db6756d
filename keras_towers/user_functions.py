"""Functions that users name on the command line, as MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from keras_towers.errors import TowerError


def call(target: str) -> Any:
    """Import MODULE:FUNCTION, also from the current folder, and call it."""
    module, _, name = target.partition(":")
    if not (module and name):
        raise TowerError(
            f"{target!r} names no function: give MODULE:FUNCTION, such as "
            "my_module:build"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise TowerError(
            f"{target} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return function()
    except Exception as error:
        raise TowerError(
            f"{target} failed: {type(error).__name__}: {error}"
        ) from error
