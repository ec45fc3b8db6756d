"""A step of all towers as a function of its own.

Keras adds a step to a function that TensorFlow keeps, with its graph, as long
as the model. The graph of this function goes once the step is built: TensorFlow
runs its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.fit.step.graph.graph_function import GraphFunction
from keras_towers.fit.step.graph.step_inputs import capture
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure
from keras_towers.partition.emission import FunctionGraph


class StepFunction:
    """A function of batches that have the same specs.

    Args:
        add: adds the step to the current graph, given a batch; returns what the
            step returns.
        batch: a batch of the current graph.

    Attributes:
        draws: how many of its draws have no seed.
    """

    def __init__(self, add: Callable[[Structure], Structure], batch: Structure):
        outer, counts = compat.get_default_graph(), compat.draws_of_graphs
        before = counts.get(outer, 0)

        def run() -> Structure:
            # Draws without a seed continue the count of the graph.
            counts[compat.get_default_graph()] = before
            return add(
                tf.nest.map_structure(_inside, batch, expand_composites=True)
            )

        graph = compat.func_graph_from_py_func(
            "step", run, (), {}, func_graph=FunctionGraph("step")
        )
        counts[outer] = counts.get(graph, 0)
        self.draws: int = counts[outer] - before
        # Without the graph, which the tensors would keep.
        self._output = tf.nest.map_structure(
            lambda leaf: (
                None if leaf is None else tf.type_spec_from_value(leaf)
            ),
            graph.structured_outputs,
        )
        self._function = GraphFunction(graph, "inlined", has_shapes=True)
        self._specs = _specs_of(batch)
        self._places = {id(t): k for k, t in enumerate(_tensors_in(batch))}
        self._captured = [
            (self._places.get(id(tensor)), tensor)
            for tensor in graph.external_captures
        ]

    def takes(self, batch: Structure) -> bool:
        """Whether a batch has the specs of the first one."""
        return _specs_of(batch) == self._specs

    def __call__(self, batch: Structure) -> Structure:
        """Add the step to the current graph; return what it returns."""
        given = _tensors_in(batch)
        results = iter(
            self._function(
                [t if k is None else given[k] for k, t in self._captured]
            )
        )
        leaves = [
            None if leaf is None else next(results)
            for leaf in _tensors_in(self._output)
        ]
        compat.forget_graphs(compat.get_default_graph(), FunctionGraph)
        return tf.nest.pack_sequence_as(
            self._output, leaves, expand_composites=True
        )


def _inside(leaf: Any) -> Any:
    """Return a leaf of a batch as the current graph has it."""
    return capture(leaf) if tf.is_tensor(leaf) else leaf


def _specs_of(batch: Structure) -> list[Any]:
    return [
        tf.TensorSpec(leaf.shape, leaf.dtype) if tf.is_tensor(leaf) else leaf
        for leaf in _tensors_in(batch)
    ]


def _tensors_in(batch: Structure) -> list[Any]:
    return tf.nest.flatten(batch, expand_composites=True)
