"""Builds a model before its first step, as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import first_time, logger
from keras_towers._types import Structure
from keras_towers.errors import TowerError
from keras_towers.fit.components import TRAINING
from keras_towers.fit.data.epoch_iterator import TowerEpochIterator
from keras_towers.fit.weights import model_state

# Attributes of a model that a step may build.
_OPTIMIZER = ("optimizer",)
_LOSSES_AND_METRICS = ("_compile_metrics", "_compile_loss")


def batch_spec(iterator: TowerEpochIterator) -> Structure:
    """Return the element spec of one tower's batch."""
    return tf.nest.map_structure(
        lambda spec: (
            spec._value_specs[0]
            if isinstance(spec, compat.PerReplicaSpec)
            else spec
        ),
        iterator.source.element_spec,
    )


def build(model: keras.Model, batch: Structure, kind: str) -> Exception | None:
    """Build the model and its metrics as on one device, not its optimizer.

    Returns the error if the model cannot be built, else None. Only the shapes
    and dtypes of the batch are used, so no data is consumed.
    """
    if any(map(compat.awaits_restore, model._flatten_layers())):
        if first_time(model, "restored before it is built"):
            logger.warning(
                "a checkpoint was restored into model %r before it was built: "
                "on one device, too, TensorFlow then restores only some of its "
                "weights. Build the model first, for example by a call on a "
                "batch, and restore it then.",
                model.name,
            )
        # The first step builds the model, as on one device.
        return TowerError("a checkpoint is restored when its layers are built")
    # Keep _symbolic_build from building it: its slots would lack its name.
    later = _unbuilt(model, _OPTIMIZER)
    if kind.startswith("predict"):
        later += _unbuilt(model, _LOSSES_AND_METRICS)
    with compat.single_device_mode(), contextlib.ExitStack() as stack:
        for part in later:
            part.built = True
            stack.callback(setattr, part, "built", False)
        unbuilt = _unbuilt(model, _LOSSES_AND_METRICS)
        try:
            model._symbolic_build(data_batch=batch)
        except Exception as error:
            # The first step builds the model, as on one device.
            logger.debug("building %s by its step: %s", model.name, error)
            for part in unbuilt:
                # It may have been built with the wrong shapes.
                part.built = False
            return error
        return None


def needs_build(model: keras.Model, kind: str) -> bool:
    """Whether a step of the model would create variables."""
    names: tuple[str, ...] = _OPTIMIZER if kind in TRAINING else ()
    if not kind.startswith("predict"):
        names += _LOSSES_AND_METRICS
    return not layers_are_built(model) or bool(_unbuilt(model, names))


def layers_are_built(model: keras.Model) -> bool:
    """Whether all layers are built that a step might build, as for its loss."""
    return all(layer.built for layer in model._flatten_layers())


def uses_optimizer(model: keras.Model, kind: str) -> bool:
    """Whether a method uses ``model.optimizer`` for all trainable weights.

    This is known once every layer is built.
    """
    has_keras_step = kind in TRAINING and model_state.has_keras_step(model)
    return has_keras_step and layers_are_built(model)


def _unbuilt(model: keras.Model, names: Sequence[str]) -> list[keras.Layer]:
    """Return the named attributes of a model that exist but are not built."""
    parts = [getattr(model, name, None) for name in names]
    return [part for part in parts if part is not None and not part.built]
