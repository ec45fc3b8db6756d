"""What towers, their columns and processes exchange in a program."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.fit.places import Places
from keras_towers.fit.step.exchanges import (
    GradientExchange,
    Members,
    exchange_tensors,
)
from keras_towers.fit.step.tower_tensors import (
    TowerTensors,
    value_of,
    with_shapes,
)
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition.program import Exchange, Tensor

Scope: TypeAlias = MutableMapping[Tensor, Any]


class TowerExchanges:
    """Adds exchanges of a program to the current graph.

    Args:
        places: where it computes, and with whom.
        order: orders the exchanges between processes.
        gradients: adds gradients up; None: as anything else is.
    """

    def __init__(
        self,
        places: Places,
        order: StepOrder,
        gradients: GradientExchange | None,
    ):
        self._mesh, self._transport = places.mesh, places.ranks.step
        self._order, self._gradients = order, gradients

    def add_to_graph(
        self,
        exchanges: Sequence[Exchange],
        known: Scope,
        towers: Sequence[TowerTensors],
        columns: Sequence[Scope],
        cells: Sequence[Sequence[TowerTensors]],
    ) -> list[Any]:
        """Exchange the tensors of a level, and add the results to their scopes.

        Args:
            exchanges: the exchanges.
            known: what all share.
            towers: the tensors of K towers.
            columns: for each of M columns, what its towers share.
            cells: for each tower, the tensors of its M columns.

        Returns:
            The results.
        """
        groups: list[Members] = []
        with tf.device(self._mesh[0][0]):
            for exchange in exchanges:
                if "columns" in exchange.over:
                    groups += self._over_columns(
                        exchange, known, towers, columns, cells
                    )
                    continue
                owners: list[Any] = [(known, towers)]
                if exchange.given.on_columns:
                    of_columns = zip(*cells, strict=True)
                    owners = [*zip(columns, of_columns, strict=True)]
                if "towers" not in exchange.over:
                    owners = [
                        (tower.shared, [tower])
                        for _, own in owners
                        for tower in own
                    ]
                groups += [
                    self._over_towers(exchange, to_all, own)
                    for to_all, own in owners
                ]
        results = exchange_tensors(
            groups, self._transport, self._order.exchange, self._gradients
        )
        for group, result in zip(groups, results, strict=True):
            exchange = group.exchange
            values = result if exchange.is_own else [result]
            for scope, value in zip(group.takers, values, strict=True):
                scope.update(with_shapes([exchange.result], [value]))
        return results

    def _over_columns(
        self,
        exchange: Exchange,
        known: Scope,
        towers: Sequence[TowerTensors],
        columns: Sequence[Scope],
        cells: Sequence[Sequence[TowerTensors]],
    ) -> list[Members]:
        """Return the columns of each tower, or micro-batch, that exchange."""
        tensor, of_batch = exchange.given, exchange.result.of_batch
        rows: list[Sequence[int]] = []
        if exchange.kind == "scatter":
            count: Any = exchange.result.shape[exchange.axis]
            rows = [(k * count, count) for k, _ in enumerate(columns)]
        # The columns' devices and tensors, and who takes the result.
        cases: list[Any] = [(self._mesh[0], columns, known, columns)]
        if tensor.on_towers:
            cases = [
                (
                    row,
                    [cell.parts[k] for cell in of_row],
                    tower.parts[k] if of_batch else tower.shared,
                    [c.parts[k] if of_batch else c.shared for c in of_row],
                )
                for row, tower, of_row in zip(
                    self._mesh, towers, cells, strict=True
                )
                for k in range(len(tower.parts) if tensor.of_batch else 1)
            ]
        return [
            Members(
                exchange,
                devices,
                [value_of(tensor, scope) for scope in scopes],
                rows,
                to_each if exchange.is_own else [to_all],
            )
            for devices, scopes, to_all, to_each in cases
        ]

    def _over_towers(
        self, exchange: Exchange, to_all: Scope, towers: Sequence[TowerTensors]
    ) -> Members:
        """Return the towers, or a column of them, as they exchange a tensor."""
        tensor, differ = exchange.given, exchange.result.of_batch
        source = tensor.operation
        parts = [part for tower in towers for part in tower.parts]
        firsts = [tower.parts[0] for tower in towers]
        if source is not None and source.at_root and self._transport.rank != 0:
            # Only the first process has it.
            values: list[Any] = []
        elif tensor.of_batch and exchange.kind in ("sum", "scatter"):
            values = [tower.sum(tensor) for tower in towers]
        else:
            shared = tensor.on_towers and not tensor.of_batch
            scopes = firsts if shared else parts
            values = [value_of(tensor, scope) for scope in scopes]
        rows = [
            [value_of(t, taker) for t in exchange.rows or ()]
            for taker in (parts if differ else firsts)
        ]
        takers: Sequence[Scope] = [to_all]
        if exchange.is_own:
            takers = parts if differ else [tower.shared for tower in towers]
        devices = [tower.device for tower in towers]
        return Members(exchange, devices, values, rows, takers)
