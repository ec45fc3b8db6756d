"""Two groups of towers that sum inside, then exchange their sums."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import Gradient, Gradients
from keras_towers.reduction.per_gradient import reduce_each
from keras_towers.reduction.placed import add_on, copy_to


def hierarchical_all_reduce(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum in two groups, then across them.

    Only one pair of devices, the main one of each group, talks across the
    groups: on a DGX-1, groups are the four GPUs that have direct links with
    each other. The main devices rotate: for gradient i they are number i mod
    K/2 of their group, so that all links across are used. The source is mode
    "hierarchical" of tensorpack's ``SyncMultiGPUTrainerReplicated``, which
    knows eight GPUs only.

    Args:
        grads: K lists of N gradients; K is 1 or even.
        devices: K device names, the first group's before the second's.

    Returns:
        K lists of N sums, bit for bit equal on all towers.

    Raises:
        TowerError: an odd number of towers, or gradients that do not fit each
            other.

    Example:
        >>> devices = [f"/device:GPU:{k}" for k in range(8)]
        >>> sums = hierarchical_all_reduce([[tf.ones([2])]] * 8, devices)
        >>> sums[5][0].numpy()
        array([8., 8.], dtype=float32)
    """
    towers = len(devices)
    if towers > 1 and towers % 2:
        raise TowerError(
            "The hierarchical all-reduce needs an even number of towers, in "
            f"two equal groups; there are {towers}. Use one more, one less, "
            "or another mode."
        )
    half = towers // 2

    def dense(index: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        mains = [devices[index % half], devices[half + index % half]]
        inside = [
            add_on(mains[0], tensors[:half]),
            add_on(mains[1], tensors[half:]),
        ]
        totals = [add_on(main, inside) for main in mains]
        return [
            copy_to(device, totals[k // half])
            for k, device in enumerate(devices)
        ]

    return reduce_each(grads, devices, dense)
