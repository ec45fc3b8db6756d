"""Run by Python when it starts, where this folder is in ``PYTHONPATH``."""

import gc
import os
import sys

if "PYTEST_CURRENT_TEST" in os.environ:
    # Keras and TensorFlow import these packages if they are there, for
    # wrappers, plots and notebooks, with all that they import in turn: a third
    # of what it takes to start a rank. No process that a test starts asks for
    # them.
    for name in ("IPython", "matplotlib", "scipy", "sklearn"):
        sys.modules[name] = None
    # What an import makes lives on: there is little to collect.
    gc.set_threshold(50_000, 20, 50)
