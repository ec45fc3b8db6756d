"""The shapes that the tensors of a program have for an assumed batch.

What a step needs, in a plan, follows from them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.emission import emit, placeholder_of
from keras_towers.partition.program import Exchange, Program, Tensor


class AssumedBatch:
    """A batch of which all towers have equally many examples.

    Args:
        program: the program that runs on it.
        towers: the number of towers, or of their micro-batches, in all
            processes.
        rows: the number of examples of each of them, and any size that the
            trace does not know.
    """

    def __init__(self, program: Program, towers: int, rows: int):
        self._program = program
        self._towers = towers
        self._rows = rows

    def inputs_of(
        self, tensors: Sequence[Tensor]
    ) -> list[tf.TensorSpec | np.ndarray]:
        """Return the specs of tensors, or their entries if these are sizes.

        Args:
            tensors: N tensors of the program.

        Raises:
            ValueError: the step does not fit these sizes.
        """
        inputs: list[tf.TensorSpec | np.ndarray] = []
        for tensor in tensors:
            value = self._values[tensor]
            entries = None
            if value.dtype.is_integer:
                entries = compat.constant_value(value)
            if entries is not None:
                inputs.append(np.asarray(entries))
                continue
            shape = tf.TensorShape(self._filled(value.shape))
            inputs.append(tf.TensorSpec(shape, value.dtype))
        return inputs

    def _filled(self, shape: tf.TensorShape) -> Any:
        if shape.rank is None:
            return None
        return [self._rows if size is None else size for size in shape]

    @functools.cached_property
    def _values(self) -> dict[Tensor, Any]:
        """The tensors in a graph of which TensorFlow infers the shapes.

        The graph has the operations of one tower, and never runs.
        """
        program, inputs = self._program, self._program.inputs
        graph = compat.FuncGraph("assumed")
        with graph.as_default():
            values = {
                tensor: placeholder_of(tensor, self._filled(tensor.shape))
                for tensor in inputs.of_graph
            }
            for index, tensor in inputs.copies.items():
                common = values[inputs.of_graph[index]]
                values[tensor] = common
                if tensor.handle != inputs.of_graph[index].handle:
                    values[tensor] = placeholder_of(tensor)
            total = self._rows * self._towers
            values[inputs.total] = tf.constant(total, tf.int64)
            values[inputs.start] = tf.constant(0, tf.int64)
            values[inputs.is_first] = tf.constant(True)
            values[inputs.is_first_part] = tf.constant(True)
            for count, start in inputs.shares.values():
                values[count] = tf.constant(self._rows, tf.int64)
                values[start] = tf.constant(0, tf.int64)
            if inputs.has_rows is not None:
                values[inputs.has_rows] = tf.constant(True)
            for tensor in inputs.sizes.values():
                values[tensor] = tf.constant(self._rows, tf.int64)
            results = {exchange.result for exchange in program.exchanges}
            for operation in program.operations:
                for tensor in operation.inputs:
                    # The step of one process also counts the rows of all.
                    known = tensor in values or tensor in results
                    if tensor.operation is None and not known:
                        values[tensor] = placeholder_of(tensor)
            for level in range(program.levels):
                operations = program.of_level(level)
                outputs = [t for o in operations for t in o.outputs]
                computed = emit(operations, values, outputs, program.graphs)
                values.update(zip(outputs, computed, strict=True))
                for exchange in program.exchanges:
                    if exchange.level == level:
                        values[exchange.result] = self._exchanged(
                            exchange, values
                        )
        return values

    def _exchanged(self, exchange: Exchange, values: dict[Tensor, Any]) -> Any:
        """Return a tensor like the result of an exchange."""
        (value,) = emit([], values, [exchange.given])
        shape = exchange.result.shape
        if "columns" in exchange.over:
            # Columns divide axes of weights: rows are those of the tower.
            if shape.rank is not None and shape.rank == value.shape.rank:
                pairs = zip(shape, value.shape, strict=True)
                shape = [own if size is None else size for size, own in pairs]
            sizes = self._filled(tf.TensorShape(shape))
            return placeholder_of(exchange.result, sizes)
        match exchange.kind:
            case "gather" if shape.is_fully_defined():
                return placeholder_of(exchange.result)
            case "scatter":
                sizes = self._filled(shape)
                return placeholder_of(exchange.result, sizes)
            case "gather":
                return tf.concat([value] * self._towers, exchange.axis)
            case "before":
                return tf.zeros_like(value)
            case "sum" if value.dtype.is_integer:
                return value * self._towers
        return tf.identity(value)
