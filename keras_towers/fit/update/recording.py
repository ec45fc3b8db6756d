"""Operations that are added to a graph again, with other inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_HERE = contextlib.nullcontext()


class Recording:
    """The newest operations of a graph that depend on given inputs."""

    # The ``inputs`` and the ``device`` are others in every repetition.
    # Operations can be repeated if those that depend on no input have no
    # effects, and read only variables that are scalars.

    def __init__(
        self,
        graph: Any,
        begin: int,
        inputs: Sequence[tf.Tensor],
        device: str,
    ):
        self.graph = graph
        self._inputs = [graph.capture(tensor) for tensor in inputs]
        self._steps: list[tuple[Any, dict[str, Any], str | None]] = []
        self.repeats = True
        changing = set(map(id, self._inputs))
        repeated: set[Any] = set()
        for operation in graph.get_operations()[begin:]:
            if changing.isdisjoint(map(id, operation.inputs)):
                self.repeats &= _is_shared(operation)
                continue
            self.repeats &= repeated.isdisjoint(operation.control_inputs)
            repeated.add(operation)
            changing.update(map(id, operation.outputs))
            attributes = dict(operation.node_def.attr)
            # Where it belongs; the device says the same.
            attributes.pop("_class", None)
            elsewhere = operation.device not in ("", device)
            self._steps.append(
                (operation, attributes, operation.device if elsewhere else None)
            )

    def repeat(self, inputs: Sequence[tf.Tensor]) -> None:
        """Add the operations again, here, with N other inputs."""
        graph = self.graph
        now = {
            id(old): graph.capture(new)
            for old, new in zip(self._inputs, inputs, strict=True)
        }
        for operation, attributes, device in self._steps:
            with tf.device(device) if device else _HERE:
                copy = graph.create_op(
                    operation.type,
                    [
                        now.get(id(tensor), tensor)
                        for tensor in operation.inputs
                    ],
                    [output.dtype for output in operation.outputs],
                    attrs=attributes,
                    op_def=operation.op_def,
                )
            for old, new in zip(operation.outputs, copy.outputs, strict=True):
                now[id(old)] = new


def _is_shared(operation: Any) -> bool:
    """Whether one result, computed once, is right in every repetition."""
    if operation.type == "ReadVariableOp":
        return operation.outputs[0].shape.rank == 0
    return not operation.op_def.is_stateful
