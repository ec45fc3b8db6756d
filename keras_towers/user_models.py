"""Models that a user names, and examples for them."""

from __future__ import annotations

import importlib
import operator
import sys
from pathlib import Path
from typing import Any

from keras_towers.errors import TowerError


def call_named(target: str, *args: Any) -> Any:
    """Import MODULE:FUNCTION, also from the current folder, and call it."""
    module, _, name = target.partition(":")
    if not (module and name):
        raise TowerError(
            f"{target!r} names no function: give MODULE:FUNCTION, such as "
            "my_module:build"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    what = "cannot be imported"
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
        what = "failed"
        return function(*args)
    except Exception as error:
        raise TowerError(
            f"{target} {what}: {type(error).__name__}: {error}"
        ) from error


def random_examples(model: Any, source: str, examples: int) -> tuple[Any, Any]:
    """Make examples from a model's inputs, outputs and compiled loss."""
    import keras
    import numpy as np

    random = np.random.default_rng(0)
    inputs = getattr(model, "inputs", None) or []
    outputs = model.outputs if inputs else []
    shapes = [tensor.shape[1:] for tensor in (*inputs, *outputs)]
    if len(outputs) != 1 or any(None in shape for shape in shapes):
        raise TowerError(
            f"{source} returned a model without data, for which none can be "
            "made: it has no inputs of known shape, or several outputs; "
            "return (model, x, y)"
        )
    # Ids that every embedding accepts.
    ids = min(
        (
            layer.input_dim
            for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.Embedding)
        ),
        default=2,
    )

    def examples_for(tensor: Any) -> Any:
        shape = (examples, *tensor.shape[1:])
        if "int" in str(tensor.dtype):
            return random.integers(ids, size=shape, dtype=np.int32)
        return random.random(shape, dtype=np.float32)

    x = [examples_for(tensor) for tensor in inputs]
    y = examples_for(outputs[0])
    # The loss may be a name, an object or a function.
    if "sparse" in repr(model.loss).lower():
        y = random.integers(y.shape[-1], size=y.shape[:-1])
    return x[0] if len(x) == 1 else x, y
