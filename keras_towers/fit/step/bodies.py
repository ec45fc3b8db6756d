"""A traced function that runs as one operation, on any device.

TensorFlow would inline every call of a function and optimise each copy, at a
cost that grows with their number. Here the function is optimised once, before
it is called, and its calls stay calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat

_numbers = itertools.count()


class Body:
    """A function of tensors, whose graph is final.

    Args:
        graph: its graph; captured tensors are its last inputs.

    Example:
        >>> graph = compat.func_graph_from_py_func(
        ...     "double", lambda x: [2 * x], [tf.TensorSpec([], tf.float32)], {}
        ... )
        >>> body = Body(graph)
        >>> tf.function(lambda x: body([x])[0])(tf.constant(3.0)).numpy()
        np.float32(6.0)
    """

    def __init__(self, graph: Any):
        self._shapes = [output.shape for output in graph.outputs]
        name = f"{graph.name}_{next(_numbers)}"
        self._function, optimises = self._define(name, graph)
        self._config = _config(optimises)

    def _define(self, name: str, graph: Any) -> tuple[Any, bool]:
        """Return the function, and whether its calls optimise it."""
        # Control flow has functions of its own, which belong to this graph.
        is_flat = not graph.as_graph_def().library.function
        function = compat.function_from_graph(
            name,
            _optimised(graph) if is_flat else graph,
            {"_noinline": True},
        )
        return function, not is_flat

    def __call__(self, inputs: Sequence[Any]) -> list[tf.Tensor]:
        """Call it in the graph that is being traced, on the current device.

        Args:
            inputs: a tensor or handle of a variable for each of its inputs.
        """
        options = {"config_proto": self._config, "executor_type": ""}
        outputs = compat.call_in_graph(self._function, list(inputs), options)
        for output, shape in zip(outputs, self._shapes, strict=True):
            output.set_shape(shape)
        return list(outputs)


def _optimised(graph: Any) -> Any:
    """Return a graph with the same inputs and outputs, as TensorFlow runs it.

    Args:
        graph: of a function that calls no others.
    """
    ends = [*graph.inputs, *graph.outputs]
    kept = {tensor.op.name for tensor in ends}
    kept |= {operation.name for operation in graph.control_outputs}
    meta = tf.compat.v1.MetaGraphDef()
    meta.graph_def.CopyFrom(graph.as_graph_def(add_shapes=True))
    # What TensorFlow takes for the results of a graph.
    meta.collection_def["train_op"].node_list.value.extend(sorted(kept))
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(compat.eager_context().config)
    # Otherwise small graphs stay as they are.
    config.graph_options.rewrite_options.min_graph_nodes = -1
    definition = compat.optimize_graph(
        config, meta, verbose=False, cluster=_host()
    )
    for node in definition.node:
        node.device = ""
    result = compat.FuncGraph(graph.name)
    with result.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    result.inputs = [_same(result, tensor) for tensor in graph.inputs]
    result.outputs = [_same(result, tensor) for tensor in graph.outputs]
    result.control_outputs = [
        result.get_operation_by_name(operation.name)
        for operation in graph.control_outputs
    ]
    result.structured_outputs = result.outputs
    return result


def _same(graph: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor of the same name, with what is known of it."""
    copy = graph.get_tensor_by_name(tensor.name)
    if tensor.dtype == tf.resource:
        compat.set_handle_data(copy, compat.get_resource_handle_data(tensor))
    else:
        copy.set_shape(tensor.shape)
    return copy


@functools.cache
def _host() -> Any:
    """A CPU to optimise for, without a session on this machine's devices."""
    device = compat.NamedDevice(name="/job:localhost/replica:0/task:0/cpu:0")
    # TensorFlow estimates costs, and prints a warning without a speed.
    device.properties.type = "CPU"
    device.properties.num_cores = 1
    device.properties.frequency = 1000
    return compat.GrapplerCluster(devices=[device])


def _config(optimises: bool) -> bytes:
    """What the user has set for all functions, serialized."""
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(compat.eager_context().config)
    if not optimises:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()
