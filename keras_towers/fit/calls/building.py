"""Building a model completely before it is placed on towers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.capture.capture import capture
from keras_towers.fit.context.attributes import Attributes
from keras_towers.fit.context.tower import Tower
from keras_towers.fit.contract import TRAINING
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights import trainers

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
    """Build the model, its metrics and its optimizer as on one device."""
    # Returns why that cannot be done; None if it has been done.
    # Only shapes and dtypes of a batch are used, so no data is consumed.
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
            logger.debug("building %s by its step: %s", model.name, error)
            for part in unbuilt:
                # It may have been built with the wrong shapes.
                part.built = False
            return _trace_once(model, batch, kind)
        names = vars(model).setdefault("_traced_for_its_layers", set())
        if kind not in names and _has_unbuilt_layers(model):
            # Its step may use what its ``call`` does not, or nothing may:
            # tried once.
            names.add(kind)
            _trace_once(model, batch, kind)
        return None


def _has_unbuilt_layers(model: keras.Model) -> bool:
    return not all(layer.built for layer in compat.layers_of(model))


def _trace_once(model: keras.Model, batch: Any, kind: str) -> Exception | None:
    """Build a model by tracing a step on one device, without running it."""

    def training(batch: Any) -> Any:
        tower = Tower(0, 1, training=True)
        return capture(model.train_step, batch, tower).output

    step: Callable[[Any], Any] = training
    if kind not in TRAINING:
        predicts = kind.startswith("predict")
        step = model.predict_step if predicts else model.test_step
    unbuilt = _unbuilt(model)
    attributes = Attributes(model, draws=True)
    before = attributes.take()
    try:
        tf.function(step, autograph=False).get_concrete_function(batch)
    except Exception as error:
        logger.debug("building %s while tracing: %s", model.name, error)
        for part in unbuilt:
            part.built = False
        # TensorFlow leaves what a function makes that fails without a value,
        # and the error of such a step would hide this one.
        made = [v._value for v in state_lib.collect(model).everything()]
        held = [v for v in made if isinstance(v, compat.BaseResourceVariable)]
        if not all(value.is_initialized() for value in held):
            raise
        return error
    finally:
        attributes.put(before)
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
    return kind in TRAINING and trainers.has_keras_step(model)


def _optimizer(model: keras.Model) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    return [] if optimizer is None else [optimizer]


def _losses_and_metrics(model: keras.Model) -> list[Any]:
    names = ("_compile_metrics", "_compile_loss")
    parts = [getattr(model, name, None) for name in names]
    return [part for part in parts if part is not None]


def _unbuilt(model: keras.Model) -> list[Any]:
    return [part for part in _losses_and_metrics(model) if not part.built]
