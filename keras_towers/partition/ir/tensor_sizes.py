"""The sizes of a program's tensors, for an assumed batch.

They follow from the layouts, as far as these know them. No shapes are inferred,
and nothing is added to a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.called_functions import functions_of
from keras_towers.partition.ir.effects import LOOPS
from keras_towers.partition.ir.estimated_work import estimated_work, rounds_of
from keras_towers.partition.ir.layouts import (
    ListOf,
    Sharded,
    Unit,
    stacked_layout,
)
from keras_towers.partition.ir.list_memory import shared_lists
from keras_towers.partition.ir.program import (
    Exchange,
    Function,
    Operation,
    Program,
    Tensor,
)
from keras_towers.partition.ir.sizes import (
    EXAMPLES,
    UNKNOWN,
    Dimension,
    Size,
    Unknown,
    symbol_name,
)
from keras_towers.partition.ir.values import Value


class TensorSizes:
    """The sizes of a tower's tensors, if all towers have equally many examples.

    Args:
        program: the program.
        towers: the number of towers, or of their micro-batches, in all
            processes.
        rows: the number of examples of each of them, and any size that the
            trace does not know.
    """

    def __init__(self, program: Program, towers: int, rows: int):
        self._towers, self._rows = max(towers, 1), rows
        self._symbols = {symbol_name(EXAMPLES): rows * towers}
        self._shapes: dict[Tensor, Sequence[int]] = {}
        self._bytes: dict[Tensor, int] = {}
        for value in program.values.values():
            self._add_value(value)
        for tensor in program.inputs.of_graph:
            self._add(tensor, ())
        for index, copy in program.inputs.copies.items():
            self._add(copy, [program.inputs.of_graph[index]])
        for event in program.events:
            if isinstance(event, Exchange):
                self._add_exchange(event)
            else:
                for tensor in event.outputs:
                    self._add(tensor, event.inputs)

    def entries(self, tensor: Tensor) -> int:
        """Return the number of entries of a tensor, or of a list's tensors."""
        shape = self._shapes.get(tensor)
        if shape is None:
            shape = self._filled(tensor, ())
        return math.prod(shape)

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor; 0 for the handle of a variable."""
        if tensor not in self._bytes:
            self._bytes[tensor] = self._bytes_of(tensor)
        return self._bytes[tensor]

    def _bytes_of(self, tensor: Tensor) -> int:
        if tensor.dtype == tf.variant:
            # The elements are numbers of four bytes, if of any.
            return 4 * self.entries(tensor) if tensor in self._shapes else 0
        if tensor.dtype in (tf.resource, tf.string):
            return 0
        return self.entries(tensor) * tensor.dtype.size

    def work_of(self, operation: Operation) -> float:
        """Estimate how many multiplications an operation takes."""
        called = functions_of(operation)
        if called and operation.source is not None:
            inside = [o for function in called for o in function.operations]
            rounds = rounds_of(operation.source)
            return rounds * sum(map(self.work_of, inside))
        if not operation.outputs:
            return 0.0
        return estimated_work(operation, self.entries)

    def add_like(
        self, tensors: Sequence[Tensor], like: Sequence[Tensor]
    ) -> None:
        """Add N tensors that are as large as N others."""
        for tensor, other in zip(tensors, like, strict=True):
            if other in self._shapes:
                self._shapes[tensor] = self._shapes[other]

    def add_changed(
        self, tensor: Tensor, like: Tensor, axis: int, sizes: Sequence[int]
    ) -> None:
        """Add a tensor that is as large as another one, but for an axis.

        Args:
            tensor: the tensor.
            like: the other one.
            axis: the axis of the other one.
            sizes: the sizes in its place.
        """
        if like in self._shapes:
            shape = [*self._shapes[like]]
            self._shapes[tensor] = [*shape[:axis], *sizes, *shape[axis + 1 :]]

    def _add_value(self, value: Value) -> None:
        """Add the sizes of a value of the trace: local and whole."""
        if value.local is not None:
            self._add_part(value.local, value, value.layout)
        if value.whole is not None and value.whole not in self._shapes:
            self._add_part(value.whole, value, None)

    def _add_part(self, tensor: Tensor, value: Value, layout: Any) -> None:
        shape = value.shape
        if tensor.dtype == tf.variant:
            elements = value.elements
            if elements is None or elements.shape is None:
                return
            length = self._length_of_list(tensor, elements.length)
            shape = (length, *elements.shape)
            if isinstance(layout, ListOf):
                layout = stacked_layout(layout.element)
        if shape is None or tensor in self._shapes:
            return
        sizes = list(map(self._length, shape))
        if isinstance(layout, Sharded) and layout.axis < len(sizes):
            sizes[layout.axis] = self._own_rows(layout)
        self._shapes[tensor] = sizes

    def _length_of_list(self, list_: Tensor, known: Dimension) -> Dimension:
        """Return the number of elements of a list that take memory."""
        loop = list_.operation
        if loop is None or loop.type not in LOOPS:
            return known
        if list_ in shared_lists(loop):
            return 0
        if known is not UNKNOWN:
            return known
        body = loop.functions.get("body")
        if not isinstance(body, Function):
            return known
        added = body.outputs[list_.index].operation
        if added is None or added.type != "TensorListPushBack":
            like = self._shapes.get(loop.inputs[list_.index])
            return like[0] if like else known
        return UNKNOWN if loop.source is None else rounds_of(loop.source)

    def _own_rows(self, layout: Sharded) -> int:
        """Return the number of rows of a tower."""
        unit, units = layout.unit, self._rows
        if isinstance(unit, Unit) and unit.of_variables:
            size = self._length(unit.size)
            units = unit.local_size or -(-size // self._towers)
        return layout.rows_per_unit * units

    def _length(self, size: Dimension) -> int:
        if isinstance(size, Unknown):
            return self._rows
        if not isinstance(size, Size):
            return int(size)
        known = [self._symbols.get(s, self._rows) ** p for s, p in size.powers]
        return size.number * math.prod(known)

    def _add(self, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
        if tensor not in self._shapes and tensor.shape.rank is not None:
            self._shapes[tensor] = self._filled(tensor, inputs)

    def _filled(
        self, tensor: Tensor, inputs: Sequence[Tensor]
    ) -> Sequence[int]:
        """Return a shape whose unknown sizes are taken from an input."""
        rank = tensor.shape.rank
        if rank is None:
            known = (self._shapes.get(t, ()) for t in inputs)
            return max(known, key=math.prod, default=())
        sizes: list[Any] = list(tensor.shape)
        if None not in sizes:
            return sizes
        like = [self._shapes[t] for t in inputs if t in self._shapes]
        like = [shape for shape in like if len(shape) == rank]
        likely = max(like, key=math.prod, default=[self._rows] * rank)
        return [
            known if size is None else size
            for size, known in zip(sizes, likely, strict=True)
        ]

    def _add_exchange(self, exchange: Exchange) -> None:
        """Add the result of an exchange."""
        given, result = exchange.given, exchange.result
        own = self._shapes.get(given)
        if result in self._shapes or own is None:
            return
        shape, axis = list(own), exchange.axis
        if exchange.kind in ("gather", "scatter"):
            shares = 1 if "columns" in exchange.over else self._towers
            known = result.shape.rank == len(shape) and result.shape[axis]
            whole = shape[axis] * shares
            part = -(-shape[axis] // self._towers)
            shape[axis] = known or (
                whole if exchange.kind == "gather" else part
            )
        self._shapes[result] = shape
