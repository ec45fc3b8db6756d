"""Layers that split badly, or hide differences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_towers.fit.context import patches

_HALF = ("float16", "bfloat16")


def stateful(model: keras.Model) -> list[str]:
    """Return the names of layers with a state for each row."""
    return [
        layer.name
        for layer in model._flatten_layers()
        if getattr(layer, "stateful", False) is True
    ]


def fixed_inputs(model: keras.Model) -> list[str]:
    """Return the names of a functional model's inputs of a fixed batch size."""
    try:
        inputs = keras.tree.flatten(model.inputs)
    except (AttributeError, ValueError):
        return []
    return [
        tensor.name
        for tensor in inputs
        if getattr(tensor, "shape", None) and tensor.shape[0] is not None
    ]


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Compute in float32 where weights have that type, inside a block."""
    # Rounding to half precision would hide differences of other causes.
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            policy = getattr(layer, "_dtype_policy", None)
            if _is_mixed(policy):
                other = {"_dtype_policy": keras.DTypePolicy("float32")}
                stack.enter_context(patches.shadowed(layer, other))
        yield


def computes_in_half(model: keras.Model) -> bool:
    """Whether a layer computes in half precision."""
    return any(
        layer.compute_dtype in _HALF for layer in model._flatten_layers()
    )


def _is_mixed(policy: Any) -> bool:
    return (
        type(policy) is keras.DTypePolicy
        and policy.variable_dtype == "float32"
        and policy.compute_dtype in _HALF
    )
