"""Checks that a script can be run, before processes run it."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
import zipfile
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path

from keras_towers.foundation.errors import TowerError


def check_script(script: str, module: bool = False) -> None:
    """Check that a script can be run, without running any of it.

    Args:
        script: its path, or the name of a module.
        module: whether it is a module.

    Raises:
        TowerError: it is not there, cannot be read or does not compile.
    """
    if module:
        return check_module(script, runs=True)
    path = Path(script)
    if path.name.startswith("python") and not path.suffix:
        raise TowerError(
            f"{script} is not a script: give the script itself, without "
            "'python'"
        )
    _check_source(path)


def check_module(module: str, runs: bool = False) -> None:
    """Check that a module can be imported, importing nothing.

    Args:
        module: its name.
        runs: whether it is to run, as by ``python -m``, which runs the module
            ``__main__`` of a package.

    Raises:
        TowerError: it is not there, cannot be read or does not compile.
    """
    if not runs and module in sys.modules:
        return
    name, *inner = module.split(".")
    spec = None
    if name:
        # A rank finds what is in its folder first.
        spec = PathFinder.find_spec(name, [os.getcwd()])
        spec = spec or importlib.util.find_spec(name)
    for part in inner:
        spec, name = _inside(spec, part), f"{name}.{part}"
    if runs and spec and spec.submodule_search_locations is not None:
        spec, name = _inside(spec, "__main__"), f"{name}.__main__"
    if spec is None:
        raise TowerError(f"no module named {name!r}")
    origin = spec.origin or ""
    if origin.endswith(tuple(SOURCE_SUFFIXES)):
        _check_source(Path(origin))


def _check_source(path: Path) -> None:
    """Check that a file can be read and compiled."""
    try:
        source = path.read_bytes()
        # Python runs these, too.
        if source.startswith(importlib.util.MAGIC_NUMBER):
            return
        if zipfile.is_zipfile(path):
            return
        with warnings.catch_warnings():
            # The process that runs it shows them.
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except (FileNotFoundError, IsADirectoryError):
        raise TowerError(f"script not found: {path}") from None
    except OSError as error:
        raise TowerError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}" if error.lineno else path
        line = f": {error.text.strip()}" if error.text else ""
        raise TowerError(f"{where}: {error.msg}{line}") from None
    except ValueError as error:  # It has null characters.
        raise TowerError(f"{path} is not a Python script: {error}") from None


def _inside(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    """Find a module of a package."""
    if package is None or package.submodule_search_locations is None:
        return None
    # By its full name, a package without __init__.py needs an imported parent.
    return PathFinder.find_spec(name, [*package.submodule_search_locations])
