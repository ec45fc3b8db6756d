"""Exchanges of a program: between the towers of a process, then its ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.program import Exchange
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key
from keras_towers.transport.messages import gathered


def exchanged(
    exchanges: Sequence[Exchange],
    every: Sequence[Sequence[Any]],
    transport: Transport,
) -> list[Any]:
    """Exchange what towers have.

    Args:
        exchanges: N exchanges of a level.
        every: for each of them what the K towers of this process give; nothing
            where only the first process has it.
        transport: connects the processes.

    Returns:
        For each of them its result; of ``before`` a list of one for each tower.
    """
    results: list[Any] = [
        _HERE[exchange.kind](own, exchange.axis) if own else None
        for exchange, own in zip(exchanges, every, strict=True)
    ]
    if transport.size == 1:
        return results
    # Those of one dtype go as one message.
    summed = {
        k: results[k] if exchange.kind == "sum" else _placed(own, transport)
        for k, (exchange, own) in enumerate(zip(exchanges, every, strict=True))
        if exchange.kind in ("sum", "before")
    }
    totals = sum_over_ranks(transport, list(summed.values())) if summed else []
    for k, total in zip(summed, totals, strict=True):
        if exchanges[k].kind == "sum":
            results[k] = total
        else:
            earlier = tf.reduce_sum(total[: transport.rank], 0)
            results[k] = [own + earlier for own in results[k]]
    for k, exchange in enumerate(exchanges):
        if exchange.kind == "gather":
            results[k] = _gathered(results[k], exchange.axis, transport)
        elif exchange.kind == "root":
            results[k] = _from_root(exchange, results[k], transport)
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


_HERE = {
    "sum": _sum,
    "gather": _gather,
    "first": _first,
    "before": _before,
    "root": _first,
}


def _placed(every: Sequence[Any], transport: Transport) -> Any:
    """A row for each rank: the sum of this one's towers in its own."""
    own = _sum(every, 0)
    zeros = tf.zeros_like(own)
    return tf.stack(
        [own if r == transport.rank else zeros for r in range(transport.size)]
    )


def _gathered(tensor: Any, axis: int, transport: Transport) -> Any:
    """Join the tensors of all ranks along an axis."""
    if axis == 0:
        return gathered(transport.all_gather, tensor, next_key("rows"))
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = order[axis], order[0]
    turned = tf.transpose(tensor, order)
    joined = gathered(transport.all_gather, turned, next_key("rows"))
    return tf.transpose(joined, order)


def _from_root(exchange: Exchange, value: Any, transport: Transport) -> Any:
    """What the first rank has, on all ranks."""
    shape, dtype = exchange.given.shape, exchange.given.dtype
    is_here = transport.rank == 0
    # TensorFlow's constant folding would exchange what it takes for constant.
    one = _one().read_value()
    if shape.is_fully_defined() and dtype != tf.string:
        count = tf.reshape(one * shape.num_elements(), [1])
        mine = value if is_here else tf.zeros(count, dtype)
        mine = tf.reshape(mine, shape)
        (result,) = transport.broadcast([mine], next_key("root"))
        return result
    # Others may not know its shape, and have no rows of it.
    nothing = tf.reshape(one - 1, [1])
    flat = tf.reshape(value, [-1]) if is_here else tf.zeros(nothing, dtype)
    rows = gathered(transport.all_gather, flat, next_key("root"))
    if shape.is_fully_defined():
        return tf.reshape(rows, shape)
    sizes = tf.shape(value) if is_here else tf.zeros(nothing, tf.int32)
    sizes = transport.all_gather(sizes, next_key("root"))
    return tf.ensure_shape(tf.reshape(rows, sizes), shape)


@functools.cache
def _one() -> tf.Variable:
    return compat.hidden_variable("CPU:0", 1, tf.int32)
