"""Reduction in two levels: the towers of a process, then the processes."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.reduction.exchange import Exchange, exact
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    split_kinds,
)
from keras_towers.transport import Transport, next_key


def across_ranks(
    reduction: Reduction, transport: Transport, exchange: Exchange = exact
) -> Reduction:
    """Let a reduction over towers go on over processes.

    The gradients of the towers of one process meet in its memory; their sums
    travel once for each process; every tower gets the result.

    Args:
        reduction: sums over the towers of this process.
        transport: connects the processes.
        exchange: how dense gradients travel between the processes.

    Returns:
        A reduction over all towers of all processes. All of them have to call
        it with gradients of the same shapes.

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
    grads: Sequence[Gradient],
    exchange: Exchange = exact,
) -> list[Gradient]:
    """Sum each of N gradients over the ranks.

    A sparse one becomes the slices of all ranks behind one another, as they
    are.

    Args:
        transport: connects the processes.
        grads: N gradients of this process.
        exchange: how the dense ones travel.
    """
    key = next_key("sum")
    dense, sparse = split_kinds(grads)
    sums = dict(
        zip(
            dense,
            exchange(transport, [grads[i] for i in dense], key),
            strict=True,
        )
    )
    for i in sparse:
        grad = grads[i]
        sums[i] = tf.IndexedSlices(
            transport.all_gather(grad.values, f"{key}.values.{i}"),
            transport.all_gather(grad.indices, f"{key}.indices.{i}"),
            grad.dense_shape,
        )
    return [sums[i] for i in range(len(grads))]
