"""Runs BytePS's scheduler, or one of its servers, until the job ends.

``python -m keras_towers.launching.byteps_server``, with the variables that
``dmlc`` describes. It needs neither TensorFlow nor a GPU.
"""

from __future__ import annotations

import sys

from keras_towers.errors import TowerError
from keras_towers.rendezvous.environments import dmlc


def main() -> None:
    """Check the variables, and serve."""
    try:
        dmlc.check_server()
    except TowerError as error:
        sys.exit(f"keras_towers: {error}")
    # It serves while it is imported.
    import byteps.server  # noqa: F401


if __name__ == "__main__":
    main()
