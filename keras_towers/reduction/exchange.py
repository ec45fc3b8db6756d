"""How dense gradients travel between processes: the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_towers.transport import Transport

Exchange: TypeAlias = Callable[
    [Transport, Sequence[tf.Tensor], str], list[tf.Tensor]
]
"""From this rank's N dense tensors to their N sums over the ranks.

The string is a prefix for the keys of the collectives, the same on all ranks;
the sums are equal on all ranks, to the bit.
"""

BUCKET_BYTES = 16 * 2**20


def exact(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum every tensor as it is, by the transport's all-reduce."""
    return transport.all_reduce(tensors, key)


def buckets(
    tensors: Sequence[tf.Tensor],
    indices: Iterable[int],
    limit: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Group tensors that are to travel as one message.

    The backward pass makes the last variable's gradient first, so the groups
    go from the last to the first: one travels while the next is computed.

    Args:
        tensors: N tensors.
        indices: those of them to group.
        limit: a group ends with the tensor that makes it this large, in bytes;
            one without a static shape is a group of its own.

    Returns:
        Groups of indices; the tensors of a group have one dtype.
    """
    groups: list[list[int]] = []
    open_groups: dict[tf.DType, tuple[list[int], int]] = {}
    for index in sorted(indices, reverse=True):
        tensor = tensors[index]
        elements = tensor.shape.num_elements()
        if elements is None:
            groups.append([index])
            continue
        members, size = open_groups.pop(tensor.dtype, ([], 0))
        if not members:
            groups.append(members)
        members.append(index)
        size += elements * tensor.dtype.size
        if size < limit:
            open_groups[tensor.dtype] = members, size
    return groups
