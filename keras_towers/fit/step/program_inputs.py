"""What the inputs of a program get that no batch has: variables, and shares."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.step.placed_tensors import PlacedTensors
from keras_towers.fit.weights.shards import share_counts
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.partition.program import ColumnInput, Inputs


def add_variables(
    tensors: PlacedTensors,
    inputs: Inputs,
    captures: Sequence[tf.Tensor],
    handles: Mapping[int, TowerHandles],
) -> None:
    """Add what a trace captures, and who has which part of it.

    Args:
        tensors: what the inputs get.
        inputs: the inputs of the program: those of the step, what it captures,
            and then those of columns.
        captures: N tensors of an outer graph.
        handles: the handles of those that towers have copies or shards of, by
            the index of the input.
    """
    last = len(inputs.of_graph) - len(inputs.of_columns)
    first = last - len(captures)
    for tensor, value in zip(
        inputs.of_graph[first:last], captures, strict=True
    ):
        tensors.shared[tensor] = capture(value)
    for index, tensor in inputs.copies.items():
        key = index if index < last else inputs.of_columns[index - last].key
        if key in handles:
            for scope in tensors.scopes(True, tensor.on_columns):
                handle = handles[key].of_tower(scope.tower, scope.column)
                scope[tensor] = capture(handle)
    with tf.device(compat.HOST):
        _add_shares(tensors, inputs)
        for tensor, own in zip(
            inputs.of_graph[last:], inputs.of_columns, strict=True
        ):
            for scope in tensors.scopes(columns=True):
                scope[tensor] = _of_column(own, scope.column, handles, tensors)


def _add_shares(tensors: PlacedTensors, inputs: Inputs) -> None:
    """Add the rows that each tower has of variables in shards."""
    places = tensors.places
    towers, ranks = places.towers, places.ranks.shards
    for scope in tensors.scopes(towers=True, parts=True):
        is_first = scope.part == 0 and places.ranks.is_first_replica
        scope[inputs.is_first_part] = tf.constant(is_first)
    for size, (count, start) in inputs.shares.items():
        counts = share_counts(size, towers * ranks.size)
        for scope in tensors.scopes(towers=True):
            tower = towers * ranks.rank + scope.tower
            scope[count] = tf.constant(counts[tower], tf.int64)
            scope[start] = tf.constant(sum(counts[:tower]), tf.int64)


def _of_column(
    own: ColumnInput,
    column: int,
    handles: Mapping[int, TowerHandles],
    tensors: PlacedTensors,
) -> tf.Tensor:
    """Return what an input that differs between columns gets."""
    match own.kind:
        case "handle":
            return capture(handles[own.key].of_tower(0, column))
        case "start":
            rows = own.key // tensors.places.columns
            return tf.constant(rows * column, tf.int64)
        case "is_first":
            return tf.constant(column == 0)


def capture(tensor: tf.Tensor) -> tf.Tensor:
    """Capture a tensor of an outer graph, or an eager one, in this graph."""
    graph: tf.Graph = compat.get_default_graph()
    with contextlib.suppress(AttributeError):
        return graph.capture(tensor)
    return tensor
