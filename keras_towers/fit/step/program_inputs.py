"""What the inputs of a program get that no batch has: variables, and shares."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.places import Places
from keras_towers.fit.step.placed_tensors import PlacedTensors
from keras_towers.fit.weights.shards import share_counts
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.partition.program import Inputs


def add_captures(
    tensors: PlacedTensors,
    inputs: Inputs,
    captures: Sequence[Any],
    on_towers: Mapping[int, TowerHandles],
) -> None:
    """Add what a trace captures.

    Args:
        tensors: what the inputs get.
        inputs: the inputs of the program: those of the step, what it captures,
            and then those of columns.
        captures: N tensors of an outer graph.
        on_towers: the handles of those that towers have copies or shards of, by
            their index among them.
    """
    last = len(inputs.of_graph) - len(inputs.of_columns)
    first = last - len(captures)
    for tensor, value in zip(
        inputs.of_graph[first:last], captures, strict=True
    ):
        tensors.shared[tensor] = capture(value)
    for index, tensor in inputs.copies.items():
        if first <= index < last:
            for scope in tensors.scopes(towers=True):
                handle = on_towers[index - first].of_tower(scope.tower)
                scope[tensor] = capture(handle)


def add_shares(tensors: PlacedTensors, inputs: Inputs, places: Places) -> None:
    """Add the rows that each tower has of variables in shards."""
    towers, ranks = places.towers, places.ranks.shards
    with tf.device(compat.HOST):
        for scope in tensors.scopes(towers=True, parts=True):
            is_first = scope.part == 0 and places.ranks.is_first_replica
            scope[inputs.is_first_part] = tf.constant(is_first)
        for size, (count, start) in inputs.shares.items():
            counts = share_counts(size, towers * ranks.size)
            for scope in tensors.scopes(towers=True):
                tower = towers * ranks.rank + scope.tower
                scope[count] = tf.constant(counts[tower], tf.int64)
                scope[start] = tf.constant(sum(counts[:tower]), tf.int64)


def add_columns(
    tensors: PlacedTensors,
    inputs: Inputs,
    handles: Mapping[int, TowerHandles],
    places: Places,
) -> None:
    """Add the inputs that differ between columns.

    Args:
        tensors: what the inputs get.
        inputs: the inputs of the program.
        handles: the handles of variables, by the index of the input.
        places: where the program computes.
    """
    first = len(inputs.of_graph) - len(inputs.of_columns)
    for index, own in enumerate(inputs.of_columns, first):
        tensor, copy = inputs.of_graph[index], inputs.copies.get(index)
        for scope in tensors.scopes(columns=True):
            with tf.device(compat.HOST):
                match own.kind:
                    case "handle":
                        handle = handles[own.key].of_tower(0, scope.column)
                        scope[tensor] = capture(handle)
                    case "start":
                        start = own.key // places.columns * scope.column
                        scope[tensor] = tf.constant(start, tf.int64)
                    case "is_first":
                        scope[tensor] = tf.constant(scope.column == 0)
        if copy is not None:
            for scope in tensors.scopes(towers=True, columns=True):
                handle = handles[own.key].of_tower(scope.tower, scope.column)
                scope[copy] = capture(handle)


def capture(tensor: Any) -> Any:
    """Capture a tensor of an outer graph, or an eager one, in this graph."""
    graph: Any = compat.get_default_graph()
    with contextlib.suppress(AttributeError):
        return graph.capture(tensor)
    return tensor
