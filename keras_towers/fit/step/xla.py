"""A traced function that XLA compiles for the device it is called on.

XLA compiles a function at its first call for inputs of certain shapes, and the
step fails if it cannot. Here it is asked before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.step.bodies import Body

# What XLA is asked with for sizes that are not known yet, one after the other:
# batches may be large for it, but no image must be smaller than a kernel, and
# some steps need a multiple of a number.
_SIZES = (8, 64, 840)
_UNKNOWN_OPERATION = re.compile(r"No registered '(\w+)' OpKernel for XLA")


class Uncompilable(Exception):
    """What XLA cannot compile a function for, such as "uses strings"."""


class XlaBody(Body):
    """A function of tensors that XLA compiles, whose graph is final.

    Args:
        graph: its graph, traced inside of ``compat.xla_context()``.
    """

    def __init__(self, graph: Any):
        # XLA is asked for tensors by their shapes, and for variables.
        self._order = sorted(
            range(len(graph.inputs)),
            key=lambda index: graph.inputs[index].dtype == tf.resource,
        )
        graph.inputs = [graph.inputs[index] for index in self._order]
        self._inputs = list(graph.inputs)
        super().__init__(graph)

    def _define(self, name: str, graph: Any) -> tuple[Any, bool]:
        attributes = {"_noinline": True, "_XlaMustCompile": True}
        return compat.function_from_graph(name, graph, attributes), True

    def __call__(self, inputs: Sequence[Any]) -> list[tf.Tensor]:
        return super().__call__([inputs[index] for index in self._order])

    def check(self, inputs: Sequence[Any], device: str) -> None:
        """Check that XLA compiles it.

        Args:
            inputs: what it will be called with.
            device: the full name of the device it will be called on.

        Raises:
            Uncompilable: XLA does not.
        """
        variables = [i for i in inputs if i.dtype == tf.resource]
        if any(map(tf.is_symbolic_tensor, variables)):
            raise Uncompilable("uses a variable of an outer function")
        tensors = self._inputs[: len(inputs) - len(variables)]
        if any(tensor.dtype == tf.string for tensor in tensors):
            raise Uncompilable("uses strings")
        are_known = all(t.shape.is_fully_defined() for t in tensors)
        error: Exception | None = None
        for size in _SIZES[:1] if are_known else _SIZES:
            specs = [
                tf.TensorSpec(_filled(t.shape, size), t.dtype) for t in tensors
            ]
            try:
                compat.lower_to_xla(
                    self._function.name, specs, variables, device
                )
            except (ValueError, tf.errors.OpError) as failure:
                error = error or failure
            else:
                return
        raise Uncompilable(_reason(str(error))) from error


def _filled(shape: tf.TensorShape, size: int) -> list[int]:
    if shape.rank is None:
        raise Uncompilable("uses tensors of an unknown rank")
    return [size if length is None else length for length in shape]


def _reason(message: str) -> str:
    """Say in a few words what XLA says in many lines."""
    unknown = sorted(set(_UNKNOWN_OPERATION.findall(message)))
    if unknown:
        return f"uses what XLA does not have: {', '.join(unknown)}"
    line = message.removeprefix("Failed getting HLO text: ").splitlines()[0]
    line = line.strip("' ")
    return f"cannot be compiled ({line})"
