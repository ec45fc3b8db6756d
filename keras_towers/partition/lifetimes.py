"""Estimates how many bytes a tower has at a time while it runs a program.

Operations run in the order of the trace, each result has memory
until its last use, elementwise ones that of an input that ends there, and an
operation needs no other memory. TensorFlow runs operations in another order and
in parallel, and its kernels need workspaces; XLA also computes several
operations as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition.emission import emit, placeholder_of
from keras_towers.partition.program import Exchange, Program, Tensor
from keras_towers.partition.rules.elementwise import ELEMENTWISE
from keras_towers.partition.sizes import (
    EXAMPLES,
    Dimension,
    Size,
    Unknown,
    symbol_name,
)

# Their results are their inputs, or the memory of a variable.
_SAME_MEMORY = """
    ExpandDims Identity IdentityN PreventGradient ReadVariableOp Reshape Squeeze
    StopGradient
"""


@dataclasses.dataclass(frozen=True)
class _Event:
    """What takes place at once: uses, and results that need memory."""

    used: Sequence[Tensor]
    made: Sequence[Tensor] = ()
    extra: int = 0
    is_elementwise: bool = False


class Lifetimes:
    """The sizes and lifetimes of what a tower computes from an assumed batch.

    Args:
        program: the program.
        towers: the number of towers, or of their micro-batches, of all
            processes.
        rows: the number of examples of each, and any size that the trace does
            not know.
        parts: the number of micro-batches of a tower, which it computes one
            after another in each level.
    """

    def __init__(
        self, program: Program, towers: int, rows: int, parts: int = 1
    ):
        self._program = program
        self._parts = parts
        # Of what each micro-batch has its own until all of them are done.
        self._held = held_tensors(program)
        self._held |= {t for t in program.inputs.of_graph if t.on_towers}
        self._summed = summed_tensors(program)
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
            if operation.type in _SAME_MEMORY.split():
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
                last[self._rooted(tensor)] = index
        for tensor in self._program.results:
            last[self._rooted(tensor)] = len(events)
        ends: dict[int, int] = {}
        for tensor, index in last.items():
            ends[index] = ends.get(index, 0) + self._bytes_of_parts(tensor)
        inputs = self._program.inputs.of_graph
        most = now = sum(self._bytes_of_parts(t) for t in inputs if t in last)
        for index, event in enumerate(events):
            own = [t for t in event.made if t not in self._root]
            now += sum(map(self._bytes_of_parts, own))
            ending = {t for t in event.used if last[self._rooted(t)] == index}
            most = max(most, now + event.extra - self._reused(event, ending))
            now -= ends.get(index, 0)
        return most

    def _rooted(self, tensor: Tensor) -> Tensor:
        """Return the tensor that has the memory of another one."""
        return self._root.get(tensor, tensor)

    def _reused(self, event: _Event, ending: Collection[Tensor]) -> int:
        """Return the bytes of inputs that become the memory of a result."""
        if not event.is_elementwise:
            return 0
        (result, *_), sizes = event.made, self._bytes
        size = sizes.get(result, 0)
        is_like = any(
            sizes.get(self._rooted(t), 0) == size and t.dtype == result.dtype
            for t in ending
        )
        return size if is_like else 0

    def _bytes_of_parts(self, tensor: Tensor) -> int:
        """Return what a tower has of a tensor, for one or all of its parts."""
        number = self._parts if tensor in self._held and tensor.of_batch else 1
        return number * self._bytes.get(tensor, 0)

    def _events(self) -> Iterator[_Event]:
        program = self._program
        for level in range(program.levels):
            operations = program.of_level(level)
            outputs = [t for o in operations for t in o.outputs]
            # What earlier micro-batches have added up.
            summed = [t for t in outputs if t in self._summed]
            before = self.bytes_of(summed) if self._parts > 1 else 0
            for operation in sorted(operations, key=lambda o: o.phase):
                yield _Event(
                    operation.inputs,
                    operation.outputs,
                    before,
                    operation.type in ELEMENTWISE,
                )
            for exchange in program.exchanges:
                if exchange.level == level:
                    yield _Event(exchange.used, [exchange.result])


def bytes_of_all(program: Program, towers: int, rows: int) -> int:
    """Return the bytes that a tower has if it keeps all that it computes.

    They follow from the sizes that the layout knows: no shapes are inferred.

    Args:
        program: the program.
        towers: as for ``Lifetimes``.
        rows: likewise.
    """
    counts: dict[Tensor, int] = {}
    for value in program.values.values():
        own = rows if value.sharded else rows * towers
        for tensor, examples in (
            (value.local, own),
            (value.whole, rows * towers),
        ):
            if tensor is not None and value.shape is not None:
                sizes = [_length(size, examples, rows) for size in value.shape]
                counts[tensor] = math.prod(sizes)
    tensors = [t for o in program.operations for t in o.outputs]
    tensors += [exchange.result for exchange in program.exchanges]
    total = 0
    for tensor in tensors:
        count = counts.get(tensor)
        if count is None and tensor.shape.rank is not None:
            count = math.prod(size or rows for size in tensor.shape)
        total += (count or 0) * tensor.dtype.size
    return total


def _length(size: Dimension, examples: int, rows: int) -> int:
    """Return the length of an axis, given how many examples it has."""
    if not isinstance(size, Size):
        return rows if isinstance(size, Unknown) else int(size)
    known = {symbol_name(EXAMPLES): examples}
    factors = [known.get(symbol, rows) ** p for symbol, p in size.powers]
    return size.number * math.prod(factors)


def held_tensors(program: Program) -> set[Tensor]:
    """Return what a tower holds of each micro-batch until all have it."""
    later = {
        tensor
        for operation in program.operations
        for tensor in operation.inputs
        if operation.on_towers
        and tensor.on_towers
        and tensor.operation is not None
        and not tensor.operation.is_repeated
        and tensor.level < operation.level
    }
    later.update(e.given for e in program.exchanges if e.kind == "gather")
    return {tensor for tensor in later if tensor.of_batch}


def summed_tensors(program: Program) -> set[Tensor]:
    """Return the towers' tensors that are summed over all towers."""
    kinds = ("sum", "scatter")
    exchanges = [e for e in program.exchanges if "towers" in e.over]
    tensors = [e.given for e in exchanges if e.kind in kinds]
    return {tensor for tensor in tensors if tensor.on_towers}


def _bytes(spec: tf.TensorSpec | Tensor | np.ndarray) -> int:
    """Return the bytes of a tensor; 0 if unknown, as for lists of tensors."""
    count = tf.TensorShape(spec.shape).num_elements()
    return 0 if count is None else count * tf.as_dtype(spec.dtype).size


class AssumedBatch:
    """A batch of which all towers have equally many examples.

    Args:
        program: the program that runs on it.
        towers: the number of towers, or of their micro-batches, in all
            processes.
        rows: the number of examples of each of them, and any size that the
            trace does not know.
    """

    def __init__(self, program: Program, towers: int, rows: int):
        self._program = program
        self._towers = towers
        self._rows = rows

    def inputs_of(
        self, tensors: Sequence[Tensor]
    ) -> list[tf.TensorSpec | np.ndarray]:
        """Return the specs of tensors, or their entries if these are sizes.

        Args:
            tensors: N tensors of the program.

        Raises:
            ValueError: the step does not fit these sizes.
        """
        inputs: list[tf.TensorSpec | np.ndarray] = []
        for tensor in tensors:
            value = self._values[tensor]
            entries = None
            if value.dtype.is_integer:
                entries = compat.constant_value(value)
            if entries is not None:
                inputs.append(np.asarray(entries))
                continue
            shape = tf.TensorShape(self._filled(value.shape))
            inputs.append(tf.TensorSpec(shape, value.dtype))
        return inputs

    def _filled(self, shape: tf.TensorShape) -> Any:
        if shape.rank is None:
            return None
        return [self._rows if size is None else size for size in shape]

    @functools.cached_property
    def _values(self) -> dict[Tensor, tf.Tensor]:
        """The tensors in a graph of which TensorFlow infers the shapes.

        The graph has the operations of one tower, and never runs.
        """
        program, inputs = self._program, self._program.inputs
        graph = compat.FuncGraph("assumed")
        with graph.as_default():
            values = {
                tensor: placeholder_of(tensor, self._filled(tensor.shape))
                for tensor in inputs.of_graph
            }
            for index, tensor in inputs.copies.items():
                common = values[inputs.of_graph[index]]
                values[tensor] = common
                if tensor.handle != inputs.of_graph[index].handle:
                    values[tensor] = placeholder_of(tensor)
            total = self._rows * self._towers
            values[inputs.total] = tf.constant(total, tf.int64)
            values[inputs.start] = tf.constant(0, tf.int64)
            values[inputs.is_first] = tf.constant(True)
            values[inputs.is_first_part] = tf.constant(True)
            for count, start in inputs.shares.values():
                values[count] = tf.constant(self._rows, tf.int64)
                values[start] = tf.constant(0, tf.int64)
            if inputs.has_rows is not None:
                values[inputs.has_rows] = tf.constant(True)
            for tensor in inputs.sizes.values():
                values[tensor] = tf.constant(self._rows, tf.int64)
            results = {exchange.result for exchange in program.exchanges}
            for operation in program.operations:
                for tensor in operation.inputs:
                    # The step of one process also counts the rows of all.
                    known = tensor in values or tensor in results
                    if tensor.operation is None and not known:
                        values[tensor] = placeholder_of(tensor)
            for level in range(program.levels):
                operations = program.of_level(level)
                outputs = [t for o in operations for t in o.outputs]
                computed = emit(operations, values, outputs, program.graphs)
                values.update(zip(outputs, computed, strict=True))
                for exchange in program.exchanges:
                    if exchange.level == level:
                        values[exchange.result] = self._exchanged(
                            exchange, values
                        )
        return values

    def _exchanged(
        self, exchange: Exchange, values: dict[Tensor, tf.Tensor]
    ) -> tf.Tensor:
        """Return a tensor like the result of an exchange."""
        (value,) = emit([], values, [exchange.given])
        shape = exchange.result.shape
        if "columns" in exchange.over:
            # Columns divide axes of weights: rows are those of the tower.
            if shape.rank is not None and shape.rank == value.shape.rank:
                pairs = zip(shape, value.shape, strict=True)
                shape = [own if size is None else size for size, own in pairs]
            sizes = self._filled(tf.TensorShape(shape))
            return placeholder_of(exchange.result, sizes)
        match exchange.kind:
            case "gather" if shape.is_fully_defined():
                return placeholder_of(exchange.result)
            case "scatter":
                sizes = self._filled(shape)
                return placeholder_of(exchange.result, sizes)
            case "gather":
                return tf.concat([value] * self._towers, exchange.axis)
            case "before":
                return tf.zeros_like(value)
            case "sum" if value.dtype.is_integer:
                return value * self._towers
        return tf.identity(value)
