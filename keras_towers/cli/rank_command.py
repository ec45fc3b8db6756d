"""What a rank runs, from options of the launcher."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from keras_towers.errors import TowerError
from keras_towers.strategies.registry import find


def rank_command(
    command: Sequence[str],
    strategy: str | None,
    towers: int | None,
    module: bool,
    served: bool,
) -> list[str]:
    """The program that a rank runs, and its arguments.

    Args:
        command: the script, and its arguments.
        strategy: the name of the one that the launcher enters, if any.
        towers: its towers in each process, if given.
        module: whether the script is the name of a module.
        served: whether there are parameter servers to connect to.

    Raises:
        TowerError: there is no such strategy, or none for the towers.
    """
    if strategy is None and towers is not None and not served:
        raise TowerError("--towers needs --strategy, or --ps")
    if strategy is None and not served:
        return [sys.executable, *(["-m"] if module else []), *command]
    if strategy is not None:
        find(strategy)
    return [
        *(sys.executable, "-m", "keras_towers.launching.script"),
        *(["--strategy", strategy] if strategy else []),
        *(["--connects"] if served else []),
        *(["--towers", str(towers)] if towers else []),
        *(["--module"] if module else []),
        *command,
    ]


def check_script(script: str, module: bool) -> None:
    """Check that a script is there.

    Args:
        script: its path, or the name of a module.
        module: which of them it is.

    Raises:
        TowerError: there is no such file.
    """
    if module or Path(script).is_file():
        return
    hint = ""
    if Path(script).name.startswith("python"):
        hint = "; give the script itself, without 'python'"
    raise TowerError(f"script not found: {script}{hint}")
