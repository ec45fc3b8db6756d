"""A traced function, called as one operation or inlined into its caller.

By default TensorFlow inlines every call of a function and optimizes each copy,
at a cost that grows with the number of calls. In the mode ``called`` it inlines
no calls and does not optimize the function; in the mode ``xla`` XLA compiles
the function. If other ranks need an output, such as a gradient, before the rest
is computed, the mode is ``inlined``: TensorFlow copies the operations into the
caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.effects import is_draw

CallMode = Literal["called", "inlined", "xla"]

_ATTRIBUTES: dict[CallMode, dict[str, bool]] = {
    "called": {"_noinline": True, "shared_rendezvous": True},
    "inlined": {},
    "xla": {"_noinline": True, "_XlaMustCompile": True},
}
_numbers = itertools.count()


class GraphFunction:
    """A function of tensors; captured tensors are its graph's last inputs.

    Args:
        graph: its graph.
        mode: how it is called.
        has_shapes: whether inputs have the shapes of the graph's inputs, so
            that results have those of its outputs.

    Attributes:
        mode: how it is called.
    """

    def __init__(
        self,
        graph: tf.Graph,
        mode: CallMode = "called",
        has_shapes: bool = False,
    ):
        self.mode: CallMode = mode
        self._has_shapes = has_shapes
        self._shapes = [output.shape for output in graph.outputs]
        # With control flow, the graph contains functions of branches and loops.
        self._is_final: bool = mode == "called" and not (
            graph.as_graph_def().library.function
        )
        self._function = compat.function_module.from_func_graph(
            f"{graph.name}_{next(_numbers)}", graph, _ATTRIBUTES[mode]
        )
        # TensorFlow would compute a call with constants before the step, and
        # without XLA, which draws other numbers.
        self._is_kept: bool = mode == "xla" and _draws(graph)
        self._has_effects: bool = self._function.call_options.is_stateful
        if self._is_kept:
            compat.never_fold(self._function)
        config = tf.compat.v1.ConfigProto()
        # Start from the user's options for all functions.
        config.CopyFrom(compat.eager_context().config)
        if self._is_final:
            config.graph_options.rewrite_options.disable_meta_optimizer = True
        self._config = config.SerializeToString()

    def __call__(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add a call of the function to the current graph."""
        if self._is_final:
            inputs = [_not_constant(tensor) for tensor in inputs]
        outputs = compat.call_in_graph(
            self._function, inputs, self._config, infer=not self._has_shapes
        )
        if self._is_kept and not self._has_effects:
            compat.run_independently(outputs[0].op)
        for output, shape in zip(outputs, self._shapes, strict=True):
            # Both shapes are inferred by TensorFlow. The one here follows from
            # shapes of inputs that may be known better, and is kept if the
            # other one is wrong, as that of a loss whose labels are broadcast.
            if output.shape.is_compatible_with(shape):
                output.set_shape(shape)
        return outputs


def _draws(graph: tf.Graph) -> bool:
    """Whether a graph, or a function that it calls, draws random numbers."""
    definition = graph.as_graph_def()
    functions = definition.library.function
    nodes = (definition.node, *(function.node_def for function in functions))
    return any(is_draw(node.op) for node in itertools.chain(*nodes))


def _not_constant(tensor: tf.Tensor) -> tf.Tensor:
    """Hide from TensorFlow that a scalar is constant."""
    # Otherwise TensorFlow would specialize the function for each constant.
    if tensor.shape.rank != 0 or tensor.dtype in (tf.resource, tf.variant):
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[])
