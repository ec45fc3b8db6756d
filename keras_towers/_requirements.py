"""Checks that TensorFlow is there and that Keras runs on it."""

from __future__ import annotations

import importlib.util
import os
import sys

from keras_towers.errors import CompatibilityError


def check_tensorflow() -> None:
    """Say what to install, before an import fails less clearly.

    Raises:
        CompatibilityError: TensorFlow is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise CompatibilityError(
            "keras_towers needs TensorFlow, which is not installed. Install it "
            "with one of: pip install 'keras-towers[cpu]', or on a machine "
            "with NVIDIA GPUs pip install 'keras-towers[gpu]'."
        )


def check_backend() -> None:
    """Say what to set where Keras does not run on TensorFlow.

    Raises:
        CompatibilityError: Keras runs on another backend.
    """
    backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow" or "keras" in sys.modules:
        # Only then: a Keras whose backend is not installed says less.
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise CompatibilityError(
            f"keras_towers works with Keras's TensorFlow backend, and Keras "
            f"runs on {backend!r}. Set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )
