"""Loading a model to resume training in a job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import h5py
import keras
import numpy as np

from keras_towers import compat
from keras_towers.dropin import compiling


def load_model(
    distribute: Callable[[Any], Any],
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, Any] | None,
    **kwargs: Any,
) -> keras.Model:
    """Load a model and make its optimizer a distributed one.

    The optimizer resumes with its saved slots and iterations. A model saved
    without an optimizer is loaded without one.

    Args:
        distribute: makes an optimizer a distributed one.
        filepath: a ``.keras`` or ``.h5`` file of any Keras 3 model.
        custom_optimizers: optimizer classes that are not part of Keras.
        custom_objects: objects by name, as for ``keras.models.load_model``.
        **kwargs: as for ``keras.models.load_model``.

    Returns:
        The model.
    """
    names = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**names, **(custom_objects or {})}, **kwargs
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if not compat.trained_by(optimizer) and model.trainable_variables:
        optimizer = model.optimizer = _with_state_of_h5(model, filepath)
    distribute(optimizer)
    compiling.prepare(model)
    return model


def _with_state_of_h5(model: keras.Model, filepath: Any) -> Any:
    """Restore the optimizer from an ``.h5`` file, built for the model.

    Keras builds it without any variables, so that it can neither load its state
    from the file nor train.
    """
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with contextlib.ExitStack() as stack:
        file = filepath
        if not isinstance(file, h5py.File):
            if not h5py.is_hdf5(file):
                return optimizer
            file = stack.enter_context(h5py.File(file, "r"))
        if "optimizer_weights" not in file:
            return optimizer
        values = [
            np.asarray(value)
            for value in compat.load_h5_optimizer_weights(file)
        ]
    if len(values) == len(optimizer.variables):
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(value)
    return optimizer
