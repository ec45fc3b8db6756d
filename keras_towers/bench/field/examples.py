"""Random examples for a model of which only shapes are known."""

from __future__ import annotations

from typing import Any

from keras_towers.errors import TowerError


def random_examples(model: Any, source: str, examples: int) -> tuple[Any, Any]:
    """Make examples from what a model takes, returns and is compiled with.

    Integers are ids below the ``input_dim`` of every embedding, without which
    they are 0 or 1; labels are as its loss expects them.

    Args:
        model: a compiled Keras model.
        source: what it is called in an error.
        examples: the number of examples.

    Raises:
        TowerError: its shapes are not known, or it has several outputs.
    """
    import numpy as np

    random = np.random.default_rng(0)
    if not model.built or not getattr(model, "inputs", None):
        raise _asked(source, "the shape of its inputs is not known")
    if len(model.outputs) != 1:
        raise _asked(source, f"it has {len(model.outputs)} outputs")

    def shape_of(tensor: Any) -> tuple[int, ...]:
        shape = tuple(tensor.shape[1:])
        if None in shape:
            raise _asked(source, f"a shape of it is {tuple(tensor.shape)}")
        return shape

    ids = _ids(model)

    def inputs(tensor: Any) -> Any:
        shape = (examples, *shape_of(tensor))
        if "int" in str(tensor.dtype):
            return random.integers(ids, size=shape, dtype=np.int32)
        return random.random(shape, dtype=np.float32)

    x = [inputs(tensor) for tensor in model.inputs]
    (output,) = model.outputs
    return x[0] if len(x) == 1 else x, _labels(
        random, _loss_name(model.loss), examples, shape_of(output)
    )


def _labels(
    random: Any, loss: str, examples: int, shape: tuple[int, ...]
) -> Any:
    import numpy as np

    if "categorical" not in loss:
        y = random.random((examples, *shape), dtype=np.float32)
        # Cross-entropy of two classes, and hinges, are of 0 and 1.
        return y.round() if "binary" in loss or "hinge" in loss else y
    *sides, classes = shape
    y = random.integers(classes, size=(examples, *sides))
    if "sparse" in loss:
        return y
    return np.eye(classes, dtype=np.float32)[y]


def _loss_name(loss: Any) -> str:
    """Name a loss as Keras does: given by name, by class or as function."""
    name = getattr(loss, "name", None) or getattr(loss, "__name__", loss)
    return str(name).lower()


def _ids(model: Any) -> int:
    """Return how many ids all embeddings know."""
    import keras

    known = [
        layer.input_dim
        for layer in _layers(model)
        if isinstance(layer, keras.layers.Embedding)
    ]
    return min(known, default=2)


def _layers(model: Any) -> Any:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers(layer)


def _asked(source: str, why: str) -> TowerError:
    return TowerError(
        f"{source} returned a model without data, for which none can be made: "
        f"{why}; return (model, x, y)"
    )
