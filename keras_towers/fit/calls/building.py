"""Building a model completely before it is placed on towers."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.contract import TRAINING
from keras_towers.fit.weights import model_binding

logger = logging.getLogger("keras_towers")


def batch_spec(iterator: Any) -> Any:
    """Return the element spec of one tower's batch."""
    return tf.nest.map_structure(
        lambda spec: (
            spec._value_specs[0]
            if isinstance(spec, compat.PerReplicaSpec)
            else spec
        ),
        iterator.source.element_spec,
    )


def build(
    model: keras.Model, batch: Any, kind: str, with_optimizer: bool = True
) -> Exception | None:
    """Build the model, its metrics and its optimizer as on one device.

    Returns why that cannot be done; None if it has been done. Only shapes and
    dtypes of a batch are used, so no data is consumed.
    """
    later = []
    if not with_optimizer or not uses_optimizer(model, kind):
        # _symbolic_build would build it; leave that to its first use.
        later += _optimizer(model)
    if kind.startswith("predict"):
        later += _losses_and_metrics(model)
    with compat.single_device_mode(), contextlib.ExitStack() as stack:
        for part in later:
            if not part.built:
                part.built = True
                stack.callback(setattr, part, "built", False)
        unbuilt = _unbuilt(model)
        try:
            model._symbolic_build(data_batch=batch)
        except Exception as error:
            # Its step builds it, as on one device.
            logger.debug("building %s by its step: %s", model.name, error)
            for part in unbuilt:
                # It may have been built with the wrong shapes.
                part.built = False
            return error
        return None


def needs_build(model: keras.Model, kind: str) -> bool:
    """Whether a step of the model would create variables."""
    parts = [*model._flatten_layers()]
    if kind in TRAINING:
        parts += _optimizer(model)
    if not kind.startswith("predict"):
        parts += _losses_and_metrics(model)
    return not all(part.built for part in parts)


def uses_optimizer(model: keras.Model, kind: str) -> bool:
    """Whether a method uses ``model.optimizer`` for all trainable weights."""
    return kind in TRAINING and model_binding.has_keras_step(model)


def _optimizer(model: keras.Model) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    return [] if optimizer is None else [optimizer]


def _losses_and_metrics(model: keras.Model) -> list[Any]:
    names = ("_compile_metrics", "_compile_loss")
    parts = [getattr(model, name, None) for name in names]
    return [part for part in parts if part is not None]


def _unbuilt(model: keras.Model) -> list[Any]:
    return [part for part in _losses_and_metrics(model) if not part.built]
