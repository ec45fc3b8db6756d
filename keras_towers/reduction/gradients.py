"""The gradients of K towers: dense or sparse, and checks that they match."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from keras_towers.foundation.errors import TowerError

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
"""One gradient of one tower, dense or as slices of its variable's rows."""

GradientT = TypeVar("GradientT", bound="Gradient | None")

Gradients: TypeAlias = Sequence[Sequence[Gradient]]
"""K lists of N gradients: one list per tower.

Gradient i belongs to the same variable on all towers.
"""


def is_sparse(gradient: Gradient) -> bool:
    """Whether a gradient is a ``tf.IndexedSlices``."""
    return isinstance(gradient, tf.IndexedSlices)


def dense_of(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """Return a tower's dense gradients."""
    return [g for g in gradients if not isinstance(g, tf.IndexedSlices)]


def on_values(
    gradient: Gradient, function: Callable[[tf.Tensor], tf.Tensor]
) -> Gradient:
    """Apply a function to the values of a dense or sparse gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    return tf.IndexedSlices(
        function(gradient.values), gradient.indices, gradient.dense_shape
    )


def scaled(
    gradients: Sequence[GradientT], factor: float | tf.Tensor
) -> list[GradientT]:
    """Multiply gradients by a number or a scalar tensor, cast to their dtypes.

    A missing gradient, which is None, remains so.
    """
    if isinstance(factor, (int, float)) and factor == 1:
        return list(gradients)

    def times(values: tf.Tensor) -> tf.Tensor:
        return values * tf.cast(factor, values.dtype)

    results: list[Any] = [
        None if g is None else on_values(g, times) for g in gradients
    ]
    return results


def divide(gradient: Gradient, number: float | tf.Tensor) -> Gradient:
    """Divide a gradient by a number, cast to its dtype."""
    return on_values(gradient, lambda v: v / tf.cast(number, v.dtype))


def check_floats(tensors: Sequence[tf.Tensor | tf.TensorSpec]) -> None:
    """Refuse integer gradients."""
    for index, tensor in enumerate(tensors):
        if not tensor.dtype.is_floating:
            raise TowerError(
                f"compression on integer gradients: gradient {index} is "
                f"{tensor.dtype.name}, and only floats are compressed. Use "
                "compression=None."
            )


def check_towers(grads: Gradients, devices: Sequence[str]) -> None:
    """Refuse gradients that would add up wrongly or hang a collective."""
    if not grads or len(grads) != len(devices):
        raise TowerError(
            f"There are gradients of {len(grads)} towers for {len(devices)} "
            "devices. Give one list of gradients per device, and at least "
            "one."
        )
    for tower, gradients in enumerate(grads):
        pairs = itertools.zip_longest(gradients, grads[0])
        for index, (gradient, first) in enumerate(pairs):
            if not _match(gradient, first):
                raise TowerError(
                    f"Gradient {index} is {_describe(gradient)} on tower "
                    f"{tower}, but {_describe(first)} on tower 0. Every tower "
                    "must compute gradients of the same variables, and leave "
                    "out variables without a gradient: check whether the "
                    "model treats the data of some towers differently."
                )


def check_sums(
    sums: object, gradients: Sequence[Gradient], source: str
) -> Sequence[Gradient]:
    """Return sums; refuse results that cannot be sums of the gradients.

    Args:
        sums: what was returned as these.
        gradients: the gradients.
        source: what returned them, in a message.
    """
    advice = (
        "It must return a list with one sum for each gradient, with its "
        "shape and dtype."
    )
    if not isinstance(sums, (list, tuple)) or len(sums) != len(gradients):
        given = type(sums).__name__
        if isinstance(sums, (list, tuple)):
            given = f"{len(sums)} sums"
        raise TowerError(
            f"{source} returned {given} for {len(gradients)} gradients. "
            f"{advice}"
        )
    for index, (total, gradient) in enumerate(
        zip(sums, gradients, strict=True)
    ):
        if not _match(total, gradient):
            raise TowerError(
                f"{source} returned {_describe(total)} as the sum of gradient "
                f"{index}, which is {_describe(gradient)}. {advice}"
            )
    return sums


def _match(gradient: object, first: object) -> bool:
    """Whether the gradients of two towers can be added."""
    kinds = tf.Tensor, tf.IndexedSlices
    if not isinstance(gradient, kinds) or not isinstance(first, kinds):
        return False
    (kind, shape), (wanted, known) = _form(gradient), _form(first)
    return kind == wanted and shape.is_compatible_with(known)


def _describe(gradient: object) -> str:
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
        return repr(gradient)
    return " ".join(map(str, _form(gradient)))


def _form(gradient: Gradient) -> tuple[str, tf.TensorShape]:
    """Return the kind, dtype and shape of a gradient; slices in any number."""
    if not isinstance(gradient, tf.IndexedSlices):
        return f"a tf.Tensor of {gradient.dtype.name}", gradient.shape
    # The number of slices may differ between towers.
    shape = tf.TensorShape([None]).concatenate(gradient.values.shape[1:])
    return f"a tf.IndexedSlices of {gradient.dtype.name}", shape
