"""How many bytes a tower has at a time while it runs a program.

An estimate: operations run in the order of the trace, each result has memory of
its own until its last use, and an operation needs no other memory. TensorFlow
runs operations in another order and in parallel, reuses the memory of inputs,
and its kernels need workspaces; XLA also computes several operations as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.assumed import AssumedBatch
from keras_towers.partition.program import Program, Tensor

# Their results are their inputs, or the memory of a variable.
_SAME_MEMORY = {
    "ExpandDims",
    "Identity",
    "IdentityN",
    "PreventGradient",
    "ReadVariableOp",
    "Reshape",
    "Squeeze",
    "StopGradient",
}


@dataclasses.dataclass(frozen=True)
class _Event:
    """What takes place at once: uses, and results that need memory."""

    used: Sequence[Tensor]
    made: Sequence[Tensor] = ()


class Lifetimes:
    """The sizes and lifetimes of what a tower computes from an assumed batch.

    Args:
        program: the program.
        towers: the number of towers of all processes.
        rows: the number of examples of each, and any size that the trace does
            not know.
    """

    def __init__(self, program: Program, towers: int, rows: int):
        self._program = program
        results = [exchange.result for exchange in program.exchanges]
        computed = [
            tensor
            for operation in program.operations
            if not operation.is_repeated
            for tensor in operation.outputs
        ]
        inputs = [t for t in program.inputs.of_graph if t.handle is None]
        tensors = [*inputs, *computed, *results]
        assumed = AssumedBatch(program, towers, rows)
        # What several tensors share has the size of the first one.
        self._root: dict[Tensor, Tensor] = {}
        specs = zip(tensors, assumed.inputs_of(tensors), strict=True)
        self._bytes = {tensor: _bytes(spec) for tensor, spec in specs}
        for operation in program.operations:
            if operation.type in _SAME_MEMORY:
                # Some have further inputs, such as a shape.
                pairs = zip(operation.inputs, operation.outputs, strict=False)
                for source, copy in pairs:
                    self._root[copy] = self._root.get(source, source)

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of tensors, also of those that nothing uses."""
        return sum(
            self._bytes[tensor] if tensor in self._bytes else _bytes(tensor)
            for tensor in tensors
        )

    def most_bytes(self) -> int:
        """Return the bytes that a tower has at a time, without variables.

        Of the batch, gathered variables, what is kept for the backward pass,
        and gradients.
        """
        events = list(self._events())
        last: dict[Tensor, int] = {}
        for index, event in enumerate(events):
            for tensor in (*event.made, *event.used):
                last[self._root.get(tensor, tensor)] = index
        for tensor in self._program.results:
            last[self._root.get(tensor, tensor)] = len(events)
        ends: dict[int, int] = {}
        for tensor, index in last.items():
            size = self._bytes.get(tensor, 0)
            ends[index] = ends.get(index, 0) + size
        inputs = self._program.inputs.of_graph
        most = now = sum(self._bytes.get(t, 0) for t in inputs if t in last)
        for index, event in enumerate(events):
            own = [t for t in event.made if t not in self._root]
            now += sum(self._bytes.get(tensor, 0) for tensor in own)
            most = max(most, now)
            now -= ends.get(index, 0)
        return most

    def _events(self) -> Iterator[_Event]:
        program = self._program
        for level in range(program.levels):
            operations = program.of_level(level)
            for operation in sorted(operations, key=lambda o: o.phase):
                yield _Event(operation.inputs, operation.outputs)
            for exchange in program.exchanges:
                if exchange.level == level:
                    yield _Event(exchange.used, [exchange.result])


def _bytes(spec: Any) -> int:
    """Return the bytes of a tensor; 0 if unknown, as for lists of tensors."""
    count = tf.TensorShape(spec.shape).num_elements()
    return 0 if count is None else count * tf.as_dtype(spec.dtype).size
