"""Checks that TensorFlow is installed and that Keras uses it."""

from __future__ import annotations

import importlib.util
import os
import sys

from keras_towers.errors import CompatibilityError


def check_tensorflow() -> None:
    """Fail with instructions, before an import fails less clearly.

    Raises:
        CompatibilityError: TensorFlow is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise CompatibilityError(
            "keras_towers needs TensorFlow, which is not installed. It comes "
            "by an extra: keras-towers[cpu], or keras-towers[gpu] on a machine "
            "with NVIDIA GPUs (in a checkout: pip install '.[cpu]')."
        )


def check_backend() -> None:
    """Fail with instructions if Keras does not use TensorFlow.

    Raises:
        CompatibilityError: Keras uses another backend.
    """
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow" or "keras" in sys.modules:
        # Otherwise not: importing Keras without its backend fails less clearly.
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise CompatibilityError(
            f"keras_towers needs Keras's TensorFlow backend, but Keras uses "
            f"{backend!r}. Set KERAS_BACKEND=tensorflow before Keras is "
            "imported."
        )
