"""Where the data of ``fit`` come from, which says how to get them sooner."""

from __future__ import annotations

import types
from typing import Any, Literal

import keras
import tensorflow as tf

Source = Literal["dataset", "PyDataset", "DataLoader", "generator", "arrays"]


def source_of(x: Any) -> Source:
    """Say what kind of data ``fit`` got.

    Args:
        x: its first argument.
    """
    if isinstance(x, tf.data.Dataset | tf.distribute.DistributedDataset):
        return "dataset"
    if isinstance(x, keras.utils.PyDataset):
        return "PyDataset"
    if isinstance(x, types.GeneratorType):
        return "generator"
    # PyTorch's, of which Keras takes it, need not be installed.
    if any(cls.__name__ == "DataLoader" for cls in type(x).__mro__):
        return "DataLoader"
    return "arrays"
