"""What the inputs of a program get that no batch has: variables, and shares."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.weights.shards import share_counts
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.partition.program import Inputs, Tensor
from keras_towers.transport import Transport


def add_captures(
    inputs: Inputs,
    captures: Sequence[Any],
    on_towers: Mapping[int, TowerHandles],
    common: dict[Any, Any],
    parts: Sequence[dict[Any, Any]],
    towers: int,
) -> None:
    """Add what a trace captures.

    Args:
        inputs: the inputs of the program: those of the step, what it captures,
            and then those of columns.
        captures: N tensors of an outer graph.
        on_towers: the handles of those that towers have copies or shards of, by
            their index among them.
        common: gets what all towers share.
        parts: get what each micro-batch has, in tower order.
        towers: the number of towers.
    """
    last = len(inputs.of_graph) - len(inputs.of_columns)
    first = last - len(captures)
    for tensor, value in zip(
        inputs.of_graph[first:last], captures, strict=True
    ):
        common[tensor] = capture(value)
    number = len(parts) // towers
    for index, tensor in inputs.copies.items():
        if first <= index < last:
            handles = on_towers[index - first]
            for k, part in enumerate(parts):
                part[tensor] = capture(handles.of_tower(k // number))


def add_shares(
    inputs: Inputs,
    parts: Sequence[dict[Any, Any]],
    towers: int,
    transport: Transport,
) -> None:
    """Add the rows that each tower has of variables in shards."""
    number = len(parts) // towers
    with tf.device(compat.HOST):
        for k, part in enumerate(parts):
            part[inputs.is_first_part] = tf.constant(k % number == 0)
        for size, (count, start) in inputs.shares.items():
            counts = share_counts(size, towers * transport.size)
            for k, part in enumerate(parts):
                tower = towers * transport.rank + k // number
                part[count] = tf.constant(counts[tower], tf.int64)
                part[start] = tf.constant(sum(counts[:tower]), tf.int64)


def column_inputs(
    inputs: Inputs,
    handles: Mapping[int, TowerHandles],
    towers: int,
    columns: int,
) -> tuple[list[dict[Tensor, Any]], list[list[dict[Tensor, Any]]]]:
    """Return the inputs that differ between columns.

    Args:
        inputs: the inputs of the program.
        handles: the handles of variables, by the index of the input.
        towers: the number K of towers.
        columns: the number M of columns.

    Returns:
        For each of M columns, the inputs that all towers share; and for each of
        K towers and its M columns, the others.
    """
    if not inputs.of_columns:
        return [], []
    of_columns: list[dict[Tensor, Any]] = [{} for _ in range(columns)]
    of_cells: list[list[dict[Tensor, Any]]] = [
        [{} for _ in range(columns)] for _ in range(towers)
    ]
    first = len(inputs.of_graph) - len(inputs.of_columns)
    for index, one in enumerate(inputs.of_columns, first):
        tensor, copy = inputs.of_graph[index], inputs.copies.get(index)
        for j, shared in enumerate(of_columns):
            match one.kind:
                case "handle":
                    found = handles[one.key]
                    shared[tensor] = capture(found.of_tower(0, j))
                    for i, cells in enumerate(of_cells):
                        if copy is not None:
                            cells[j][copy] = capture(found.of_tower(i, j))
                case "start":
                    with tf.device(compat.HOST):
                        start = one.key // columns * j
                        shared[tensor] = tf.constant(start, tf.int64)
                case "is_first":
                    with tf.device(compat.HOST):
                        shared[tensor] = tf.constant(j == 0)
    return of_columns, of_cells


def capture(tensor: Any) -> Any:
    """Capture a tensor of an outer graph, or an eager one, in this graph."""
    graph: Any = compat.get_default_graph()
    with contextlib.suppress(AttributeError):
        return graph.capture(tensor)
    return tensor
