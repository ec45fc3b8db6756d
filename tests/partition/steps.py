"""Keras's own training steps, laid out over towers."""

import contextlib
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partitioned
from keras_towers.partition.effects import is_variable, variable_spec
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.partition.kit import on_towers


class Step:
    """A function of a batch as one device traces it, run by towers.

    Args:
        function: takes a batch and returns logs, such as ``train_step``.
        batch: says of what shapes and dtypes batches are.
        mirrored: whether each tower has its own copies of variables.
    """

    def __init__(self, function, batch, mirrored=False):
        leaves = tf.nest.flatten(batch, expand_composites=True)
        count = examples_in(batch)
        is_row = [leaf.shape[:1] == [count] for leaf in leaves]
        specs = [
            tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
            if row
            else tf.TensorSpec.from_tensor(leaf)
            for leaf, row in zip(leaves, is_row, strict=True)
        ]

        def traced(*given):
            packed = tf.nest.pack_sequence_as(
                batch, given, expand_composites=True
            )
            self._logs = tf.nest.map_structure(
                tf.convert_to_tensor, function(packed)
            )

        self.graph = compat.func_graph_from_py_func(
            "one_device", traced, specs, {}
        )
        self._captured = [tensor for tensor, _ in self.graph.captures]
        layouts = [Sharded(0) if row else REPLICATED for row in is_row]
        layouts += [REPLICATED] * len(self._captured)
        wanted = tf.nest.flatten(self._logs)
        self._variables = {
            index: variable_spec(inside)
            for index, inside in enumerate(self.graph.inputs)
            if mirrored and index >= len(is_row) and is_variable(inside)
        }
        self.program = partitioned(
            self.graph,
            layouts,
            wanted,
            mirrored=[k in self._variables for k in range(len(layouts))],
        )
        self._is_row = is_row
        self._copies = {}
        self._run = tf.function(self._step, autograph=False)

    def _step(self, parts, counts):
        given = [*parts, *([tensor] for tensor in self._captured)]
        copies = {
            index: [handle, *(variable.handle for variable in variables)]
            for index, (handle, variables) in self._copies[counts].items()
        }
        found = on_towers(self.program, given, counts, copies=copies)
        return tf.nest.pack_sequence_as(self._logs, found)

    def _of_towers(self, count):
        """Return handles of the model's variables, and the others' copies."""
        found = {}
        for index, (dtype, shape) in self._variables.items():
            handle = self._captured[index - len(self._is_row)]
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            variables = [
                tf.Variable(value, shape=shape) for _ in range(1, count)
            ]
            found[index] = handle, variables
        return found

    def _mirrored(self, counts):
        """Yield each variable's value, and the others' copies."""
        for index, (handle, variables) in self._copies[counts].items():
            dtype, _ = self._variables[index]
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            for variable in variables:
                yield value, variable

    def __call__(self, batch, counts):
        """Take a step on the parts of a batch; return its logs."""
        leaves = tf.nest.flatten(batch, expand_composites=True)
        ends = np.cumsum([0, *counts])
        parts = [
            [leaf[a:b] for a, b in zip(ends, ends[1:], strict=False)]
            if row
            else [leaf]
            for leaf, row in zip(leaves, self._is_row, strict=True)
        ]
        counts = tuple(counts)
        if counts not in self._copies:
            self._copies[counts] = self._of_towers(len(counts))
        for value, variable in self._mirrored(counts):
            variable.assign(value)
        logs = self._run(parts, counts)
        for value, variable in self._mirrored(counts):
            np.testing.assert_array_equal(value, variable)
        return logs


def examples_in(batch):
    """Return the number of examples of a batch."""
    leaf = tf.nest.flatten(batch)[0]
    return int(tf.shape(leaf, tf.int64)[0])


def uneven(count):
    """Return the numbers of examples of three towers, one of them none."""
    first = count * 5 // 8
    return first, 0, count - first


@contextlib.contextmanager
def laid_out(made, mirrored=False):
    """Have Keras's ``fit`` train by towers in a block.

    Args:
        made: gets the steps that are traced.
        mirrored: whether each tower has its own copies of variables.
    """

    def make_train_function(model, force=False):
        steps = {}

        def one(batch):
            count = examples_in(batch)
            key = tuple(
                leaf.shape[1:] if leaf.shape[:1] == [count] else leaf.shape
                for leaf in tf.nest.flatten(batch, expand_composites=True)
            )
            if key not in steps:
                steps[key] = Step(model.train_step, batch, mirrored)
                made.append(steps[key])
            return steps[key](batch, uneven(count))

        def function(iterator):
            logs = one(next(iterator))
            for _ in range(1, model.steps_per_execution):
                with contextlib.suppress(StopIteration):
                    logs = one(next(iterator))
            return logs

        if model.train_function is None or force:
            model.train_function = function

    with unittest.mock.patch.object(
        keras.Model, "make_train_function", make_train_function
    ):
        yield
