"""Two-level reduction: the towers of a process, then the processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_towers.reduction.exchange import Exchange, exact
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    dense_of,
    split_kinds,
)
from keras_towers.transport import Transport, next_key

Summed = TypeVar("Summed", bound=Gradient)


def across_ranks(
    reduction: Reduction, transport: Transport, exchange: Exchange = exact
) -> Reduction:
    """Extend a reduction over towers to several processes.

    Gradients are summed over the towers of each process first; each process
    then sends its sums once, and every tower gets the result.

    Args:
        reduction: sums over the towers of this process.
        transport: connects the processes.
        exchange: how dense gradients are exchanged between the processes.

    Returns:
        A reduction over all towers of all processes. All processes have to
        call it with gradients of the same shapes.

    Example:
        >>> reduce = across_ranks(sum_on_host, HorovodTransport())
    """

    def reduce(
        grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        rows = grads if len(grads) == 1 else reduction(grads, devices)
        sums = sum_over_ranks(transport, rows[0], exchange)
        return [sums for _ in devices]

    return reduce


def sum_over_ranks(
    transport: Transport,
    grads: Sequence[Summed],
    exchange: Exchange = exact,
) -> list[Summed]:
    """Sum each of N gradients over the ranks.

    Sparse gradients become the slices of all ranks, concatenated in rank order.

    Args:
        transport: connects the processes.
        grads: N gradients of this process.
        exchange: how the dense ones are exchanged.
    """
    key = next_key("sum")
    dense, sparse = split_kinds(grads)
    totals = exchange(transport, dense_of(grads), key)
    sums: dict[int, Any] = dict(zip(dense, totals, strict=True))
    for i in sparse:
        grad: Any = grads[i]
        sums[i] = tf.IndexedSlices(
            transport.all_gather(grad.values, f"{key}.values.{i}"),
            transport.all_gather(grad.indices, f"{key}.indices.{i}"),
            grad.dense_shape,
        )
    return [sums[i] for i in range(len(grads))]
