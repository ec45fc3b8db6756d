"""What towers, their columns and processes exchange in a program."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.step.exchanges import exchange_tensors
from keras_towers.fit.step.places import Place, value_of, with_shapes
from keras_towers.fit.step.step_order import StepOrder
from keras_towers.partition.program import Exchange, Tensor
from keras_towers.transport import SingleProcess, Transport


class TowerExchanges:
    """Adds exchanges of a program to the current graph.

    Args:
        mesh: for each of K towers, the devices of its M columns.
        transport: connects the processes.
        order: orders the exchanges between processes.
    """

    def __init__(
        self,
        mesh: Sequence[Sequence[str]],
        transport: Transport,
        order: StepOrder,
    ):
        self._mesh = mesh
        self._transport = transport
        self._order = order

    def add_to_graph(
        self,
        exchanges: Sequence[Exchange],
        known: MutableMapping[Tensor, Any],
        towers: Sequence[Place],
        columns: Sequence[MutableMapping[Tensor, Any]],
        cells: Sequence[Sequence[Place]],
    ) -> None:
        """Exchange tensors, and add the results to their tensors."""
        of_towers = [e for e in exchanges if e.over == "towers"]
        shared = [e for e in of_towers if not e.given.on_columns]
        if shared:
            self._over_towers(shared, known, towers)
        own = [e for e in of_towers if e.given.on_columns]
        for column, places in zip(
            columns, zip(*cells, strict=True), strict=True
        ):
            if own:
                self._over_towers(own, column, places)
        of_columns = [e for e in exchanges if e.over == "columns"]
        for exchange in of_columns:
            if not exchange.given.on_towers:
                self._over_columns(
                    exchange, self._mesh[0], columns, known, columns
                )
                continue
            for row, tower, of_row in zip(
                self._mesh, towers, cells, strict=True
            ):
                number = len(tower.parts) if exchange.given.of_batch else 1
                for k in range(number):
                    of_batch = exchange.result.of_batch
                    self._over_columns(
                        exchange,
                        row,
                        [place.parts[k] for place in of_row],
                        tower.parts[k] if of_batch else tower.shared,
                        [p.parts[k] if of_batch else p.shared for p in of_row],
                    )

    def _over_columns(
        self,
        exchange: Exchange,
        devices: Sequence[str],
        given: Sequence[Mapping[Tensor, Any]],
        to_all: MutableMapping[Tensor, Any],
        to_each: Sequence[MutableMapping[Tensor, Any]],
    ) -> None:
        """Exchange a tensor of the columns of a tower.

        Args:
            exchange: the exchange.
            devices: the M columns' devices.
            given: the tensors of each column.
            to_all: gets a result that all columns share.
            to_each: get the results that columns have of their own.
        """
        values = [value_of(exchange.given, scope) for scope in given]
        rows: list[Sequence[int]] = []
        if exchange.kind == "scatter":
            count: Any = exchange.result.shape[exchange.axis]
            rows = [(k * count, count) for k in range(len(devices))]
        with tf.device(devices[0]):
            (result,) = exchange_tensors(
                [exchange], [values], [rows], devices, SingleProcess()
            )
        if not exchange.is_own:
            to_all.update(with_shapes([exchange.result], [result]))
            return
        for scope, value in zip(to_each, result, strict=True):
            scope.update(with_shapes([exchange.result], [value]))

    def _over_towers(
        self,
        exchanges: Sequence[Exchange],
        known: MutableMapping[Tensor, Any],
        towers: Sequence[Place],
    ) -> None:
        """Exchange tensors of towers, or of a column of them."""
        transport = self._transport
        devices = [tower.device for tower in towers]
        parts = [part for tower in towers for part in tower.parts]

        def given(exchange: Exchange) -> list[Any]:
            """Return what towers, or micro-batches, exchange."""
            tensor = exchange.given
            source = tensor.operation
            # Only the first process has it.
            if source is not None and source.at_root and transport.rank != 0:
                return []
            if tensor.of_batch and exchange.kind in ("sum", "scatter"):
                return [tower.sum(tensor) for tower in towers]
            if tensor.of_batch or not tensor.on_towers:
                return [value_of(tensor, part) for part in parts]
            return [value_of(tensor, tower.parts[0]) for tower in towers]

        def rows_of(exchange: Exchange) -> list[list[Any]]:
            """Return which rows of the result the towers, or parts, get."""
            differ = exchange.result.of_batch
            takers = parts if differ else [tower.parts[0] for tower in towers]
            rows = exchange.rows or ()
            return [[value_of(t, taker) for t in rows] for taker in takers]

        rows = list(map(rows_of, exchanges))
        with tf.device(devices[0]):
            results = self._order.exchange(
                list(map(given, exchanges)),
                lambda values: exchange_tensors(
                    exchanges, values, rows, devices, transport
                ),
            )
        for exchange, result in zip(exchanges, results, strict=True):
            if exchange.result.on_towers:
                differ = exchange.result.of_batch
                takers = parts if differ else [t.shared for t in towers]
                for tensors, value in zip(takers, result, strict=True):
                    tensors.update(with_shapes([exchange.result], [value]))
            else:
                known.update(with_shapes([exchange.result], [result]))
