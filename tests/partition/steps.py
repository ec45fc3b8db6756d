"""Keras's own training steps, laid out over towers."""

import contextlib
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partitioned
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.partition.kit import on_towers


class Step:
    """A function of a batch as one device traces it, run by towers.

    Args:
        function: takes a batch and returns logs, such as ``train_step``.
        batch: says of what shapes and dtypes batches are.
    """

    def __init__(self, function, batch):
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
        self.program = partitioned(self.graph, layouts, wanted)
        self._is_row = is_row
        self._run = tf.function(self._step, autograph=False)

    def _step(self, parts, counts):
        given = [*parts, *([tensor] for tensor in self._captured)]
        found = on_towers(self.program, given, counts)
        return tf.nest.pack_sequence_as(self._logs, found)

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
        return self._run(parts, tuple(counts))


def examples_in(batch):
    """Return the number of examples of a batch."""
    leaf = tf.nest.flatten(batch)[0]
    return int(tf.shape(leaf, tf.int64)[0])


def uneven(count):
    """Return the numbers of examples of three towers, one of them none."""
    first = count * 5 // 8
    return first, 0, count - first


@contextlib.contextmanager
def laid_out(made):
    """Have Keras's ``fit`` train by towers in a block.

    Args:
        made: gets the steps that are traced.
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
                steps[key] = Step(model.train_step, batch)
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
