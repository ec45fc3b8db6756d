"""Sums over processes, by communication hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import tensorflow as tf

from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    dense_of,
    in_order,
    sparse_of,
)
from keras_towers.transport import Transport
from keras_towers.transport.keys import next_key

CommunicationHook: TypeAlias = Callable[
    [Transport, Sequence[tf.Tensor], str], list[tf.Tensor]
]
"""Returns the N sums over the ranks of this rank's N dense tensors.

The string is a prefix for the keys of the collectives, the same on all ranks.
The sums are bit-identical on every rank.
"""

Summed = TypeVar("Summed", bound=Gradient)


def all_reduce(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum tensors losslessly, by the transport's all-reduce."""
    return transport.all_reduce(tensors, key)


def across_ranks(
    reduction: Reduction,
    transport: Transport,
    hook: CommunicationHook = all_reduce,
) -> Reduction:
    """Extend a reduction over towers to several processes.

    Gradients are summed over the towers of each process first; each process
    then sends its sums once, and every tower gets the result. All processes
    have to call it with gradients of the same shapes.
    """

    def reduce(
        grads: Gradients, devices: Sequence[str]
    ) -> list[list[Gradient]]:
        rows = grads if len(grads) == 1 else reduction(grads, devices)
        sums = sum_over_ranks(transport, rows[0], hook)
        return [sums for _ in devices]

    return reduce


def sum_over_ranks(
    transport: Transport,
    grads: Sequence[Summed],
    hook: CommunicationHook = all_reduce,
) -> list[Summed]:
    """Sum each of N gradients over the ranks; a hook sums dense ones."""
    key = next_key("sum")
    totals = hook(transport, dense_of(grads), key)
    # Sparse gradients become the slices of all ranks, in rank order.
    slices = [
        tf.IndexedSlices(
            transport.all_gather(grad.values, f"{key}.values.{n}"),
            transport.all_gather(grad.indices, f"{key}.indices.{n}"),
            grad.dense_shape,
        )
        for n, grad in enumerate(sparse_of(grads))
    ]
    return in_order(grads, totals, slices)


def sum_separately(
    transport: Transport,
    tensors: Sequence[tf.Tensor],
    key: str,
    is_separate: Callable[[tf.Tensor], bool],
    sum_chosen: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Sum some tensors by a given function, and the rest by an all-reduce."""
    sums = list(tensors)
    # An engine may reject empty messages.
    full = [i for i, t in enumerate(tensors) if t.shape.num_elements() != 0]
    chosen = [i for i in full if is_separate(tensors[i])]
    others = [i for i in full if i not in set(chosen)]
    totals = [*sum_chosen([tensors[i] for i in chosen])] if chosen else []
    if others:
        rest = [tensors[i] for i in others]
        totals += transport.all_reduce(rest, f"{key}.rest")
    for i, total in zip([*chosen, *others], totals, strict=True):
        sums[i] = total
    return sums
