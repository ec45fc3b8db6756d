"""Exchanges of a program: between the towers of a process, then its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.program import Exchange
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key


def exchanged(
    exchanges: Sequence[Exchange],
    every: Sequence[Sequence[Any]],
    transport: Transport,
) -> list[Any]:
    """Exchange what towers have.

    Args:
        exchanges: N exchanges of a level.
        every: for each of them what the K towers of this process give.
        transport: connects the processes.

    Returns:
        For each of them its result; of ``before`` a list of one for each tower.
    """
    results: list[Any] = [
        _HERE[exchange.kind](own, exchange.axis)
        for exchange, own in zip(exchanges, every, strict=True)
    ]
    if transport.size == 1:
        return results
    sums = [k for k, e in enumerate(exchanges) if e.kind == "sum"]
    if sums:
        totals = sum_over_ranks(transport, [results[k] for k in sums])
        for k, total in zip(sums, totals, strict=True):
            results[k] = total
    for k, exchange in enumerate(exchanges):
        if exchange.kind == "gather":
            results[k] = _gathered(results[k], exchange.axis, transport)
        elif exchange.kind == "before":
            earlier = _of_earlier_ranks(every[k], transport)
            results[k] = [own + earlier for own in results[k]]
    return results


def _sum(every: Sequence[Any], axis: int) -> Any:
    return every[0] if len(every) == 1 else tf.add_n(list(every))


def _gather(every: Sequence[Any], axis: int) -> Any:
    return every[0] if len(every) == 1 else tf.concat(list(every), axis)


def _first(every: Sequence[Any], axis: int) -> Any:
    return every[0]


def _before(every: Sequence[Any], axis: int) -> list[Any]:
    """For each tower the sum of those before it."""
    before = [tf.zeros_like(every[0])]
    for value in every[:-1]:
        before.append(before[-1] + value)
    return before


_HERE = {"sum": _sum, "gather": _gather, "first": _first, "before": _before}


def _gathered(tensor: Any, axis: int, transport: Transport) -> Any:
    """Join the tensors of all ranks along an axis."""
    if axis == 0:
        return transport.all_gather(tensor, next_key("rows"))
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = order[axis], order[0]
    joined = transport.all_gather(tf.transpose(tensor, order), next_key("rows"))
    return tf.transpose(joined, order)


def _of_earlier_ranks(every: Sequence[Any], transport: Transport) -> Any:
    """The sum over the towers of all ranks before this one."""
    here = tf.one_hot(transport.rank, transport.size, dtype=every[0].dtype)
    (sums,) = sum_over_ranks(transport, [here * tf.add_n(list(every))])
    return tf.reduce_sum(sums[: transport.rank])
