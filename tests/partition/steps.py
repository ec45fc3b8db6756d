"""A model's training step, laid out over towers."""

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partitioned
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.partition.kit import on_towers


class Step:
    """The training step of a model that is built and compiled.

    Args:
        model: the model.
        batch: a batch, which says of what shapes and dtypes batches are.
        static: whether the number of examples is known while it is traced.
    """

    def __init__(self, model, batch, static=False):
        self._model = model
        self._updates = []
        leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch)]
        first = [None] if not static else leaves[0].shape[:1]
        specs = [
            tf.TensorSpec([*first, *leaf.shape[1:]], leaf.dtype)
            for leaf in leaves
        ]
        optimizer = model.optimizer
        vars(optimizer)["apply"] = self._note
        try:
            self.graph = compat.func_graph_from_py_func(
                "one_device",
                lambda *given: self._traced(batch, given),
                specs,
                {},
            )
        finally:
            del vars(optimizer)["apply"]
        outside = {id(inside) for _, inside in self.graph.captures}
        self._captured = [tensor for tensor, _ in self.graph.captures]
        layouts = [
            REPLICATED if id(tensor) in outside else Sharded(0)
            for tensor in self.graph.inputs
        ]
        self._gradients = [
            part
            for gradients, _ in self._updates
            for gradient in gradients
            for part in _parts(gradient)
        ]
        self._logs_flat = [
            tf.nest.flatten(log)[0] for log in tf.nest.flatten(self._logs)
        ]
        wanted = [*self._gradients, *self._logs_flat]
        self.program = partitioned(self.graph, layouts, wanted)
        self._run = tf.function(self._step, autograph=False)

    def _note(self, gradients, variables=None):
        self._updates.append((list(gradients), list(variables)))

    def _traced(self, batch, given):
        packed = tf.nest.pack_sequence_as(batch, given)
        logs = self._model.train_step(packed)
        self._logs = {k: tf.convert_to_tensor(v) for k, v in logs.items()}

    def _step(self, parts, counts):
        given = [[*own] for own in zip(*parts, strict=True)]
        given += [[tensor] for tensor in self._captured]
        found = on_towers(self.program, given, counts)
        left = iter(found[: len(self._gradients)])
        for gradients, variables in self._updates:
            sums = [
                _again(gradient, variable, left)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            self._model.optimizer.apply(sums, variables)
        logs = found[len(self._gradients) :]
        return tf.nest.pack_sequence_as(self._logs, logs)

    def __call__(self, batch, counts):
        """Take a step on the parts of a batch; return its logs."""
        leaves = tf.nest.flatten(batch)
        ends = np.cumsum([0, *counts])
        parts = [
            [tf.convert_to_tensor(leaf[a:b]) for leaf in leaves]
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        logs = self._run(parts, tuple(counts))
        return {key: np.asarray(value) for key, value in logs.items()}


def _parts(gradient):
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def _again(gradient, variable, left):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.constant(list(variable.shape))
        return tf.IndexedSlices(next(left), next(left), shape)
    return next(left)
