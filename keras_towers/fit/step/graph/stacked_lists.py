"""Lists of tensors as inputs and results of functions that XLA compiles.

XLA's functions only take and return numbers. Outside of them, lists are
TensorFlow's own. So these functions take and return the stacks of the elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.step.graph.graph_function import GraphFunction
from keras_towers.partition.emission import graph_of_inputs
from keras_towers.partition.ir.program import Function, Tensor

_OF_TENSOR = "TensorListFromTensor"
# Any rank; what describes TensorFlow's types has no such shape.
_ANY: Any = None


class StackedLists:
    """A compiled function that takes or returns lists of tensors.

    Args:
        function: the function, which takes and returns lists.
        body: what it computes.
        dtypes: of the elements of lists.
    """

    def __init__(
        self,
        function: GraphFunction,
        body: Function,
        dtypes: Mapping[Tensor, Any],
    ):
        self._inputs, self._outputs = body.inputs, body.outputs
        self._dtypes = dtypes
        stacks = {
            tensor: Tensor(dtype, tf.TensorShape(_ANY), tensor.axes)
            for tensor, dtype in dtypes.items()
        }

        def run(known: dict[Tensor, tf.Tensor]) -> list[tf.Tensor]:
            values = [
                _list_of(known[stacks[t]]) if t in dtypes else known[t]
                for t in body.inputs
            ]
            results: list[tf.Tensor] = []
            for tensor, value in zip(
                body.outputs, function(values), strict=True
            ):
                if tensor not in dtypes:
                    results.append(value)
                    continue
                stack = _stack_of(value, dtypes[tensor])
                results += [stack, _length_of(value, stack)]
            return results

        inputs = [stacks.get(tensor, tensor) for tensor in body.inputs]
        self._function = GraphFunction(graph_of_inputs(inputs, run), "xla")

    def __call__(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add a call of the function to the current graph."""
        tensors = [
            _stack_of(value, self._dtypes[tensor])
            if tensor in self._dtypes
            else value
            for tensor, value in zip(self._inputs, inputs, strict=True)
        ]
        results = iter(self._function(tensors))
        return [
            _list_of(next(results)[: next(results)])
            if tensor in self._dtypes
            else next(results)
            for tensor in self._outputs
        ]


def _list_of(stack: tf.Tensor) -> tf.Tensor:
    """Return the list of the rows of a tensor."""
    return tf.raw_ops.TensorListFromTensor(
        tensor=stack, element_shape=tf.shape(stack)[1:]
    )


def _stack_of(list_: tf.Tensor, dtype: tf.DType | None) -> tf.Tensor:
    """Return the elements of a list as the rows of a tensor."""
    if list_.op.type == _OF_TENSOR:
        return list_.op.inputs[0]
    return tf.raw_ops.TensorListStack(
        input_handle=list_, element_shape=-1, element_dtype=dtype
    )


def _length_of(list_: tf.Tensor, stack: tf.Tensor) -> tf.Tensor:
    """Return the length of a list in XLA.

    XLA's lists, and so their stacks, have their largest possible length. XLA
    knows where a list ends only if elements are pushed and popped. If they are
    set, it takes the length for 0, and the list has all elements.

    Args:
        list_: the list.
        stack: its stack.
    """
    zeros = tf.zeros_like(list_)
    popped, last = tf.raw_ops.TensorListPopBack(
        input_handle=zeros, element_shape=-1, element_dtype=stack.dtype
    )
    mark = tf.ones_like(last)
    # It may be full: the next element takes the place of the last one, then.
    last_row, next_row = (
        _marked_row(
            tf.raw_ops.TensorListPushBack(input_handle=before, tensor=mark),
            mark,
        )
        for before in (popped, zeros)
    )
    return tf.where(next_row > 0, last_row + 1, tf.shape(stack)[0])


def _marked_row(list_: tf.Tensor, mark: tf.Tensor) -> tf.Tensor:
    """Return the index of the marked element, in a list of zeros."""
    stack = _stack_of(list_, mark.dtype)
    # Elements without entries are all alike: the first one will do.
    rows = tf.reshape(stack, [tf.shape(stack)[0], tf.size(mark)])
    has_mark = tf.reduce_any(tf.cast(rows, tf.bool), 1)
    return tf.argmax(tf.cast(has_mark, tf.int32), output_type=tf.int32)
