"""Models that cannot run on parts of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.contract import TowerConfig


def check(model: keras.Model, config: TowerConfig) -> None:
    """Check that a model can be given a part of a batch.

    Args:
        model: the model.
        config: the towers.

    Raises:
        TowerError: it keeps a state for each row of a batch.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise TowerError(
                f"layer {layer.name!r} of model {model.name!r} is stateful: it "
                "keeps a state for each row of the batch, but each of the "
                f"{config.num_replicas} towers gets other rows. Build it with "
                "stateful=False, or train this model on one device, outside of "
                f"{config.name}."
            )


@contextlib.contextmanager
def causes_noted(call: TowerCall) -> Iterator[None]:
    """Add to any error what may have caused it.

    Towers get parts of a batch of a fixed size: most models that were built for
    batches of one size, as a ``Sequential`` is by its first batch, run on
    others all the same. And a model that cannot be built on one device is
    tried on the towers, where it may fail otherwise.
    """
    model, config = call.model, call.config
    try:
        yield
    except Exception as error:
        reason = call.not_built
        if reason is not None and type(reason) is not type(error):
            error.add_note(
                f"Before, model {model.name!r} could not be built on one "
                f"device: {type(reason).__name__}: {reason}"
            )
        for size, name in _fixed(model):
            error.add_note(
                f"Model {model.name!r} was built for batches of exactly {size} "
                f"rows (input {name!r}), but each of the "
                f"{config.num_replicas} towers gets only a part of a batch. If "
                "that is the reason, build it with keras.Input(shape), without "
                "batch_size."
            )
        raise


def _fixed(model: keras.Model) -> list[tuple[int, str]]:
    """Return the fixed batch sizes of a model's inputs, with their names."""
    try:
        inputs: list[Any] = keras.tree.flatten(model.inputs)
    except (AttributeError, ValueError):
        # A subclassed model, or one without a graph of layers yet.
        return []
    return [
        (tensor.shape[0], tensor.name)
        for tensor in inputs
        if getattr(tensor, "shape", None) and tensor.shape[0] is not None
    ]
