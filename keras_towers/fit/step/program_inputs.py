"""What the inputs of a program get that no batch has: variables, and shares."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.places import Places
from keras_towers.fit.weights.shards import share_counts
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.partition.program import Inputs, Tensor


@dataclasses.dataclass(eq=False)
class StepInputs:
    """What the inputs of a program get.

    Attributes:
        common: the inputs that all towers share.
        parts: the inputs of each micro-batch, in tower order.
        of_columns: those of each of M columns, if there are any.
        of_cells: for each tower, those of its M columns.
    """

    common: dict[Tensor, Any]
    parts: list[dict[Tensor, Any]]
    of_columns: Sequence[dict[Tensor, Any]] = ()
    of_cells: Sequence[Sequence[dict[Tensor, Any]]] = ()

    def add_captures(
        self,
        inputs: Inputs,
        captures: Sequence[Any],
        on_towers: Mapping[int, TowerHandles],
        number: int,
    ) -> None:
        """Add what a trace captures.

        Args:
            inputs: the inputs of the program: those of the step, what it
                captures, and then those of columns.
            captures: N tensors of an outer graph.
            on_towers: the handles of those that towers have copies or shards
                of, by their index among them.
            number: the number of micro-batches of each tower.
        """
        last = len(inputs.of_graph) - len(inputs.of_columns)
        first = last - len(captures)
        for tensor, value in zip(
            inputs.of_graph[first:last], captures, strict=True
        ):
            self.common[tensor] = capture(value)
        for index, tensor in inputs.copies.items():
            if first <= index < last:
                handles = on_towers[index - first]
                for k, part in enumerate(self.parts):
                    part[tensor] = capture(handles.of_tower(k // number))

    def add_shares(self, inputs: Inputs, places: Places) -> None:
        """Add the rows that each tower has of variables in shards."""
        towers, ranks = places.towers, places.ranks.shards
        with tf.device(compat.HOST):
            for k, part in enumerate(self.parts):
                is_first = k % places.parts == 0
                part[inputs.is_first_part] = tf.constant(
                    is_first and places.ranks.is_first_replica
                )
            for size, (count, start) in inputs.shares.items():
                counts = share_counts(size, towers * ranks.size)
                for k, part in enumerate(self.parts):
                    tower = towers * ranks.rank + k // places.parts
                    part[count] = tf.constant(counts[tower], tf.int64)
                    part[start] = tf.constant(sum(counts[:tower]), tf.int64)

    def add_columns(
        self,
        inputs: Inputs,
        handles: Mapping[int, TowerHandles],
        places: Places,
    ) -> None:
        """Add the inputs that differ between columns.

        Args:
            inputs: the inputs of the program.
            handles: the handles of variables, by the index of the input.
            places: where the program computes.
        """
        if not inputs.of_columns:
            return
        columns = range(places.columns)
        self.of_columns = [{} for _ in columns]
        self.of_cells = [[{} for _ in columns] for _ in places.mesh]
        first = len(inputs.of_graph) - len(inputs.of_columns)
        for index, own in enumerate(inputs.of_columns, first):
            tensor, copy = inputs.of_graph[index], inputs.copies.get(index)
            for j, shared in enumerate(self.of_columns):
                match own.kind:
                    case "handle":
                        variable = handles[own.key]
                        shared[tensor] = capture(variable.of_tower(0, j))
                        for i, cells in enumerate(self.of_cells):
                            if copy is not None:
                                cells[j][copy] = capture(
                                    variable.of_tower(i, j)
                                )
                    case "start":
                        with tf.device(compat.HOST):
                            start = own.key // places.columns * j
                            shared[tensor] = tf.constant(start, tf.int64)
                    case "is_first":
                        with tf.device(compat.HOST):
                            shared[tensor] = tf.constant(j == 0)


def capture(tensor: Any) -> Any:
    """Capture a tensor of an outer graph, or an eager one, in this graph."""
    graph: Any = compat.get_default_graph()
    with contextlib.suppress(AttributeError):
        return graph.capture(tensor)
    return tensor
