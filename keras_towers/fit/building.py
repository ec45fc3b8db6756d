"""Creating what a model still lacks, before it goes onto towers."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import keras

from keras_towers import compat

logger = logging.getLogger("keras_towers")


def build(model: keras.Model, batch: Any) -> None:
    """Create what the model, its metrics and its optimizer still lack.

    Everything is made as on one device, from the shapes and dtypes of a batch,
    so that nothing is drawn from the data.

    Args:
        model: the model.
        batch: structure of tensors or specs, as given to ``train_step``.
    """
    optimizer = getattr(model, "optimizer", None)
    with compat.single_device_mode(), contextlib.ExitStack() as stack:
        if optimizer is not None and not _surely_uses_it(model):
            # Keras would build it too; its first use will, if there is one.
            optimizer.built, before = True, optimizer.built
            stack.callback(setattr, optimizer, "built", before)
        try:
            model._symbolic_build(data_batch=batch)
        except RuntimeError as error:
            # Keras itself would then build while tracing; so do we, under the
            # strategy, which puts what is made on all towers.
            logger.info("building %s while tracing: %s", model.name, error)


def _surely_uses_it(model: keras.Model) -> bool:
    """Whether the model's training step is Keras's own, with its optimizer."""
    return type(model).train_step is compat.TensorFlowTrainer.train_step


def needs_build(model: keras.Model) -> bool:
    """Whether a step of the model would still create variables."""
    parts = [*model._flatten_layers(), getattr(model, "optimizer", None)]
    parts += [
        getattr(model, name, None)
        for name in ("_compile_metrics", "_compile_loss")
    ]
    return not all(part.built for part in parts if part is not None)
