"""What towers, their columns and processes exchange in a program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.step.exchange_kinds import (
    GradientExchange,
    Members,
    exchange_tensors,
)
from keras_towers.fit.step.placed_tensors import (
    Place,
    PlacedTensors,
    with_shapes,
)
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition.emission import value_of
from keras_towers.partition.program import Exchange
from keras_towers.reduction import Collectives

# The axes of places.
_TOWERS, _COLUMNS, _PARTS = range(3)


def add_exchanges(
    exchanges: Sequence[Exchange],
    tensors: PlacedTensors,
    collectives: Collectives,
    order: StepOrder,
    gradients: GradientExchange | None,
) -> list[Any]:
    """Exchange the tensors of a level, and add the results to them.

    Args:
        exchanges: the exchanges.
        tensors: the tensors of the step.
        collectives: exchange tensors among the devices of this process.
        order: orders the exchanges between processes.
        gradients: adds gradients up; None: as anything else is.

    Returns:
        The results.
    """
    with tf.device(tensors.shared.device):
        groups = [m for e in exchanges for m in _members(e, tensors)]
    results = exchange_tensors(
        groups,
        collectives,
        tensors.places.ranks.step,
        order.exchange,
        gradients,
    )
    for group, result in zip(groups, results, strict=True):
        exchange = group.exchange
        values = result if exchange.is_own else [result]
        for scope, value in zip(group.takers, values, strict=True):
            scope.update(with_shapes([exchange.result], [value]))
    return results


def _members(exchange: Exchange, tensors: PlacedTensors) -> Iterator[Members]:
    """Yield who exchanges a tensor: those that differ along its axes."""
    given, along = _given(exchange, tensors), _axes_of(exchange)
    of_mesh = tensors.lengths(towers=True, columns=True)
    of_all = tensors.lengths(towers=True, columns=True, parts=True)
    lengths = list(given.shape)
    for axis in along:
        lengths[axis] = of_all[axis] if exchange.is_own else 1
    if not exchange.result.of_batch:
        lengths[_PARTS] = 1
    others = [1 if a in along else n for a, n in enumerate(given.shape)]
    for place in np.ndindex(*others):
        devices = [
            tensors.places.mesh[tower][column]
            for tower, column, _ in _line(of_mesh, place, along)
        ]
        values = [given[k] for k in _line(given.shape, place, along)]
        takers = [
            tensors.scope(lengths, taker)
            for taker in _line(lengths, place, along)
        ]
        rows: list[Any] = [
            [value_of(t, taker) for t in exchange.rows or ()]
            for taker in takers
        ]
        if exchange.kind == "scatter" and _COLUMNS in along:
            count: Any = exchange.result.shape[exchange.axis]
            rows = [(taker.column * count, count) for taker in takers]
        yield Members(exchange, devices, values, rows, takers)


def _given(exchange: Exchange, tensors: PlacedTensors) -> np.ndarray:
    """Return the values that are exchanged, by their places."""
    tensor = exchange.given
    source, rank = tensor.operation, tensors.places.ranks.step.rank
    if source is not None and source.at_root and rank != 0:
        # Only the first process has it.
        return np.empty((1, 1, 0), object)
    is_sum = exchange.kind in ("sum", "scatter")
    if is_sum and "columns" not in exchange.over:
        return tensors.sum(tensor)
    return tensors.array(tensor)


def _axes_of(exchange: Exchange) -> Sequence[int]:
    """Return the axes of places along which this process exchanges."""
    if "columns" in exchange.over:
        return [_COLUMNS]
    return [_TOWERS, _PARTS] if "towers" in exchange.over else [_PARTS]


def _line(
    lengths: Sequence[int], place: Sequence[int], along: Sequence[int]
) -> Iterator[Place]:
    """Yield the places that differ from one along axes."""
    return itertools.product(
        *(
            range(length) if axis in along else [place[axis]]
            for axis, length in enumerate(lengths)
        )
    )
