"""Reductions that sum in one place: the host, or the towers in turn."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.reduction.gradients import Gradient, Gradients
from keras_towers.reduction.per_gradient import reduce_each
from keras_towers.reduction.placed import add_and_copy, host_of


def sum_on_host(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum all gradients on the host.

    Gradients are copied to the first CPU of the towers' machine and back: best
    if the GPUs cannot access each other directly. If the towers are logical
    CPUs, the host is the first of them. Ports mode "cpu" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``.

    Args:
        grads: K lists of N gradients.
        devices: K device names.

    Returns:
        K lists of N sums.

    Raises:
        TowerError: the towers' gradients do not match.

    Example:
        >>> devices = ["/device:GPU:0", "/device:GPU:1"]
        >>> sums = sum_on_host([[tf.ones([2])], [tf.ones([2])]], devices)
        >>> sums[1][0].numpy()
        array([2., 2.], dtype=float32)
    """

    def dense(_: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return add_and_copy(host_of(devices[0]), tensors, devices)

    return reduce_each(grads, devices, dense, lambda _: host_of(devices[0]))


def sum_on_towers(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum gradient i on tower i mod K.

    This spreads the work and the traffic over the towers. Ports mode "gpu" of
    tensorpack's ``SyncMultiGPUTrainer``, which divides the variables among the
    GPUs in the same way.

    Args:
        grads: K lists of N gradients.
        devices: K device names.

    Returns:
        K lists of N sums.

    Raises:
        TowerError: the towers' gradients do not match.

    Example:
        >>> devices = ["/device:GPU:0", "/device:GPU:1"]
        >>> sums = sum_on_towers([[tf.ones([2])], [tf.ones([2])]], devices)
        >>> sums[1][0].numpy()
        array([2., 2.], dtype=float32)
    """

    def dense(index: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return add_and_copy(devices[index % len(devices)], tensors, devices)

    return reduce_each(grads, devices, dense)
