"""Reductions that handle one gradient at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    check_towers,
    is_sparse,
)
from keras_towers.reduction.sparse import sum_slices


def reduce_each(
    grads: Gradients,
    devices: Sequence[str],
    dense: Callable[[int, Sequence[tf.Tensor]], Sequence[tf.Tensor]],
    sparse_on: Callable[[int], str] | None = None,
) -> list[list[Gradient]]:
    """Reduce gradient by gradient.

    They are reduced from last to first, the order in which the backward pass
    computes them: where ops keep their order, reduction can then start before
    the backward pass ends.

    Args:
        grads: K lists of N gradients.
        devices: K device names.
        dense: returns the K sums for i and gradient i of the K towers.
        sparse_on: returns the device on which the slices of gradient i are
            concatenated. None: tower i mod K, which spreads the work.

    Returns:
        K lists of N sums; for one tower, the gradients themselves.

    Raises:
        TowerError: the towers' gradients do not match.

    Example:
        >>> def everywhere(i, tensors):
        ...     return [tf.add_n(tensors)] * len(tensors)
        >>> devices = ["/device:CPU:0", "/device:CPU:1"]
        >>> sums = reduce_each([[tf.ones([2])]] * 2, devices, everywhere)
        >>> sums[1][0].numpy()
        array([2., 2.], dtype=float32)
    """
    check_towers(grads, devices)
    if len(grads) == 1:
        return [list(grads[0])]
    columns: list[Sequence[Gradient]] = []
    for index, column in reversed(list(enumerate(zip(*grads, strict=True)))):
        if is_sparse(column[0]):
            main = (
                sparse_on(index) if sparse_on else devices[index % len(devices)]
            )
            columns.append(sum_slices(column, main, devices))
        else:
            columns.append(dense(index, column))
    columns.reverse()
    return [[column[k] for column in columns] for k in range(len(grads))]
