"""Two groups of towers that sum internally, then exchange their sums."""

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
    """Sum within two groups, then across them.

    Only the main devices of the groups communicate across groups: on a DGX-1, a
    group is four GPUs with direct links to each other. The main devices rotate
    (number i mod K/2 of each group for gradient i), so that all links between
    the groups are used. Ports mode "hierarchical" of tensorpack's
    ``SyncMultiGPUTrainerReplicated``, which supports only eight GPUs.

    Args:
        grads: K lists of N gradients; K is 1 or even.
        devices: K device names, the first group's before the second's.

    Returns:
        K lists of N sums, bit-identical on all towers.

    Raises:
        TowerError: an odd number of towers, or gradients that do not match.

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
