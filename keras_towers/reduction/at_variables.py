"""Sums of gradients, each beside its variable."""

from __future__ import annotations

from collections.abc import Sequence

from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    check_towers,
    is_sparse,
)
from keras_towers.reduction.placed import add_on
from keras_towers.reduction.sparse import sum_slices


def sum_at_variables(
    grads: Gradients, devices: Sequence[str], places: Sequence[str]
) -> list[Gradient]:
    """Sum gradient i of all towers on the device of variable i.

    For variables that exist once: the sum is needed there and nowhere else.
    The source is tensorpack's ``SyncMultiGPUParameterServerBuilder``.

    Args:
        grads: K lists of N gradients.
        devices: K device names, of the towers.
        places: N device names, of the variables.

    Returns:
        N sums.

    Raises:
        TowerError: the towers' gradients do not fit each other.

    Example:
        >>> towers = ["/device:GPU:0", "/device:GPU:1"]
        >>> grads = [[tf.ones([2])], [tf.ones([2])]]
        >>> sum_at_variables(grads, towers, ["/device:CPU:0"])[0].numpy()
        array([2., 2.], dtype=float32)
    """
    check_towers(grads, devices)
    if len(grads) == 1:
        return list(grads[0])
    return [
        sum_slices(column, place, [place])[0]
        if is_sparse(column[0])
        else add_on(place, column)
        for column, place in zip(zip(*grads, strict=True), places, strict=True)
    ]
