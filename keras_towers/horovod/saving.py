"""Loading a model to resume training under Horovod."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras

from keras_towers.dropin import saving
from keras_towers.horovod.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
    **kwargs: Any,
) -> keras.Model:
    """Load a model and make its optimizer a distributed one.

    The optimizer resumes with its saved slots and iterations. A model saved
    without an optimizer is loaded without one.

    Args:
        filepath: a ``.keras`` or ``.h5`` file of any Keras 3 model.
        custom_optimizers: optimizer classes that are not part of Keras.
        custom_objects: objects by name, as for ``keras.models.load_model``.
        compression: as for ``DistributedOptimizer``.
        legacy_opts: ignored; it has no meaning in Keras 3.
        **kwargs: as for ``keras.models.load_model``.

    Returns:
        The model.
    """
    del legacy_opts
    distribute = functools.partial(
        DistributedOptimizer, compression=compression
    )
    return saving.load_model(
        distribute, filepath, custom_optimizers, custom_objects, **kwargs
    )
