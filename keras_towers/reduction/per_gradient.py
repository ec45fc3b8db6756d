"""Reductions that treat one gradient after the other."""

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

    They are taken from the last to the first, the order in which
    backpropagation makes them: where the order of ops is kept, the first of
    them need not wait for the end of the backward pass.

    Args:
        grads: K lists of N gradients.
        devices: K device names.
        dense: from i and gradient i of the K towers, to the K sums.
        sparse_on: the device that the slices of gradient i are put together
            on. None: tower i mod K, which spreads the work.

    Returns:
        K lists of N sums; the gradients themselves for one tower.

    Raises:
        TowerError: the towers' gradients do not fit each other.

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
