"""``python -m keras_towers``: the command ``keras-towers``, or a script.

The first word is a command (``python -m keras_towers run``) or else a script,
which runs in this process (``python -m keras_towers train.py``). A script that
has the name of a command is ``./run``.
"""

import sys
from pathlib import Path

from keras_towers.cli.main import COMMANDS, app
from keras_towers.foundation.errors import CompatibilityError, TowerError
from keras_towers.jobs.launching.script import run_as_is


def main() -> None:
    """Run the command or the script."""
    words = sys.argv[1:]
    first = words[0] if words else "--help"
    if first in COMMANDS or (first.startswith("-") and first != "-m"):
        app(prog_name="keras-towers")
    try:
        if first != "-m" and not Path(first).exists():
            raise TowerError(
                f"{first!r} is neither a script nor one of the commands "
                f"{', '.join(COMMANDS)}"
            )
        run_as_is(words)
    except (CompatibilityError, TowerError) as error:
        print(f"python -m keras_towers: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
