"""Exchanges: how dense gradients are summed over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_towers.transport import Transport

Exchange: TypeAlias = Callable[
    [Transport, Sequence[tf.Tensor], str], list[tf.Tensor]
]
"""From this rank's N dense tensors to their N sums over the ranks.

The string is a prefix for the keys of the collectives, the same on all ranks.
The sums are bit-identical on every rank.
"""

BUCKET_BYTES = 16 * 2**20


def exact(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum tensors without loss, by the transport's all-reduce."""
    return transport.all_reduce(tensors, key)


def in_buckets(
    sum_bucket: Exchange,
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
    *,
    chosen: Sequence[int],
    others: Sequence[int],
    limit: int = BUCKET_BYTES,
) -> list[tf.Tensor]:
    """Sum some tensors in ``buckets``, and others by the transport.

    Args:
        sum_bucket: sums tensors of the same dtype.
        transport: connects the ranks.
        tensors: N tensors.
        key: as for an ``Exchange``.
        chosen: the indices of those that are summed in buckets.
        others: the indices of those that the transport's all-reduce sums.
        limit: as for ``buckets``.

    Returns:
        N sums; what is neither chosen nor among the others is as it was.
    """
    sums = list(tensors)
    groups = buckets(tensors, chosen, limit)
    exchanges = [(sum_bucket, str(n), group) for n, group in enumerate(groups)]
    if others:
        exchanges.append((exact, "others", list(others)))
    for exchange, name, members in exchanges:
        parts = [tensors[i] for i in members]
        totals = exchange(transport, parts, f"{key}.{name}")
        for index, total in zip(members, totals, strict=True):
            sums[index] = total
    return sums


def buckets(
    tensors: Sequence[tf.Tensor],
    indices: Iterable[int],
    limit: int = BUCKET_BYTES,
) -> list[list[int]]:
    """Group tensors to be sent as one message.

    The backward pass computes the last variable's gradient first, so the groups
    go from last to first: one is sent while the next is computed.

    Args:
        tensors: N tensors.
        indices: the indices of those to group.
        limit: a group is closed once it has this many bytes; a tensor without
            a static shape forms its own group.

    Returns:
        Groups of indices; all tensors of a group have the same dtype.
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
