"""Pairs of a mean and a variance in a graph, which one exchange computes.

``rules/reductions.py`` adds that exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import tensorflow as tf

_COPIES = ("Identity", "StopGradient", "Snapshot")


class PairedVariances:
    """The pairs of a mean and a variance in a graph.

    Args:
        operations: the operations of the graph.

    Attributes:
        variance_of: the operations of variances, by the names of those of
            their means.
        mean_of: the names of the means, by those of these operations.
    """

    def __init__(self, operations: Iterable[tf.Operation] = ()):
        self.variance_of: dict[str, tf.Operation] = {}
        self.mean_of: dict[str, str] = {}
        for operation in operations:
            variance = _variance_of(operation)
            if variance is not None:
                self.variance_of[operation.name] = variance
                self.mean_of[variance.name] = operation.outputs[0].name


def _variance_of(mean: tf.Operation) -> tf.Operation | None:
    """Return the operation that computes the variance of a mean, or None."""
    if mean.type != "Mean" or not mean.get_attr("keep_dims"):
        return None
    if not mean.outputs[0].dtype.is_floating:
        return None
    entries, axes = mean.inputs
    for squares in _find_squares(mean.outputs[0], entries):
        for operation in squares.consumers():
            is_mean = (
                operation.type == "Mean" and operation.inputs[0] is squares
            )
            if is_mean and _same_axes(operation.inputs[1], axes):
                return operation
    return None


def _find_squares(
    mean: tf.Tensor, entries: tf.Tensor
) -> Iterator[tf.Operation]:
    """Yield the squared differences between entries and their mean."""
    waiting = [mean]
    while waiting:
        tensor = waiting.pop()
        for operation in tensor.consumers():
            if operation.type in _COPIES:
                waiting += operation.outputs
            elif {*map(id, operation.inputs)} != {id(tensor), id(entries)}:
                continue
            elif operation.type == "SquaredDifference":
                yield operation.outputs[0]
            elif operation.type == "Sub":
                for square in operation.outputs[0].consumers():
                    if square.type == "Square":
                        yield square.outputs[0]


def _same_axes(one: tf.Tensor, other: tf.Tensor) -> bool:
    if one is other:
        return True
    values = [tf.get_static_value(t) for t in (one, other)]
    if any(value is None for value in values):
        return False
    return sorted(values[0].ravel()) == sorted(values[1].ravel())
