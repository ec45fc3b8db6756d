"""Refusing models that cannot run on parts of a batch."""

from __future__ import annotations

from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.contract import TowerConfig


def check(model: keras.Model, kind: str, config: TowerConfig) -> None:
    """Check that a model can be given a part of a batch.

    Args:
        model: the model.
        kind: the running method.
        config: the towers.

    Raises:
        TowerError: it keeps a state for each row of a batch, or was built for
            batches of one size.
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
    if config.batches == "each" and kind == "fit":
        return
    for size, name in _fixed(model):
        raise TowerError(
            f"model {model.name!r} was built for batches of exactly {size} "
            f"rows (input {name!r}), but each of the {config.num_replicas} "
            "towers gets only a part of a batch. Build it with "
            "batch_size=None: keras.Input(shape) without batch_size."
        )


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
