"""Operations on slices of a large weight, as a program gets them.

``weight_slices.py`` says which of them, and in which order.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Program,
    Tensor,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.sliced_weights.axis_slices import (
    Cut,
    Slicer,
)
from keras_towers.partition.timeline.sliced_weights.sliced_uses import ROWS, Use


class SliceWriter:
    """Adds operations and exchanges of slices in place of those of a program.

    Args:
        program: the program.
        sizes: the sizes of its tensors; gets those of what is added.
    """

    def __init__(self, program: Program, sizes: TensorSizes):
        self._program, self._sizes = program, sizes
        self._builder = Builder()
        self._slicer = Slicer(self._builder, sizes)
        # What stands for tensors: others, or slices along an axis.
        self._tensors: dict[Tensor, Tensor] = {}
        self._slices: dict[Tensor, tuple[Cut, int, list[Tensor]]] = {}
        # What stands for events, and what comes before what.
        self._events: dict[Event, list[Event]] = {}
        self._before: dict[Event, list[Event]] = collections.defaultdict(list)

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return what stands for a tensor, put together."""
        if tensor in self._slices and tensor not in self._tensors:
            cut, axis, slices = self._slices[tensor]
            whole = self._slicer.joined(slices, axis, cut)
            self._tensors[tensor] = whole
        return self._tensors.get(tensor, tensor)

    def _stands_for(self, event: Event, new: Event) -> None:
        """Note what stands for an event, after what comes before."""
        for other in self._program.before.get(event, ()):
            self._before[new] += self._events.get(other, ())
        self._events.setdefault(event, []).append(new)

    def _exchange_of(
        self,
        exchange: Exchange,
        cut: Cut,
        index: int,
        given: Tensor,
        of_result: Cut | None = None,
        **changes: Any,
    ) -> Exchange:
        """Add the exchange of a slice.

        Args:
            exchange: that of the whole.
            cut: how its axis is cut.
            index: the slice.
            given: what towers contribute.
            of_result: how that of the result is cut; None: alike.
            **changes: what else differs.
        """
        shape, whole = [*exchange.result.shape], [*(exchange.sizes or ())]
        shape[0] = (of_result or cut).size(index)
        whole[0] = cut.size(index)
        result = dataclasses.replace(
            exchange.result, shape=tf.TensorShape(shape)
        )
        new = dataclasses.replace(
            exchange,
            given=given,
            result=result,
            sizes=whole,
            units=cut.towers if exchange.axis == 0 else exchange.units,
            **changes,
        )
        self._builder.events.append(new)
        self._stands_for(exchange, new)
        return new

    def _on_slice(
        self,
        operation: Operation,
        use: Use,
        cut: Cut,
        index: int,
        found: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> tuple[Operation, Tensor | None]:
        """Add the operation on a slice.

        Args:
            operation: the operation.
            use: how it runs on slices.
            cut: how the axis is cut.
            index: the slice.
            found: slices of tensors.

        Returns:
            The operation and, of a lookup, which rows are in the slice.
        """
        self._builder.name = operation.name
        inputs = [
            found[tensor]
            if tensor in found
            else self._whole(tensor)
            if axis is None
            else self._slice(tensor, axis, cut, index)
            for tensor, axis in zip(operation.inputs, use.inputs, strict=True)
        ]
        is_in = None
        if use.label is ROWS:
            slicer, numbers = self._slicer, inputs[1]
            if operation.type == "GatherV2":
                inputs[1], is_in = slicer.in_table(numbers, cut, index)
            else:
                own, inside = slicer.own_numbers(numbers, cut, index)
                shape, dtype = numbers.shape, inputs[2].dtype
                inputs[1] = self._builder.op(
                    "SelectV2", [inside, own, -1], shape
                )
                inputs[2] = self._builder.constant(cut.size(index), dtype)
        return self._copy(operation, inputs, use, cut, index), is_in

    def _slice(self, tensor: Tensor, axis: int, cut: Cut, index: int) -> Tensor:
        if tensor in self._slices and self._slices[tensor][:2] == (cut, axis):
            *_, slices = self._slices[tensor]
            return slices[index]
        return self._slicer.slice_of(self._whole(tensor), axis, cut, index)

    def _copy(
        self,
        operation: Operation,
        inputs: Sequence[Tensor],
        use: Use,
        cut: Cut,
        index: int,
    ) -> Operation:
        outputs: list[Tensor] = []
        copy = dataclasses.replace(
            operation,
            inputs=inputs,
            outputs=outputs,
            suffix=f"{operation.suffix}_slice",
        )
        for tensor, axis in zip(operation.outputs, use.outputs, strict=True):
            shape: list[Any] = tensor.shape.as_list()
            if axis is not None:
                shape[axis] = cut.size(index)
            own = dataclasses.replace(
                tensor, operation=copy, shape=tf.TensorShape(shape)
            )
            outputs.append(own)
            if axis is None:
                self._sizes.add_like([own], [tensor])
            else:
                self._sizes.add_changed(own, tensor, axis, [shape[axis]])
        self._builder.events.append(copy)
        return copy

    def _added(self, tensor: Tensor, before: Tensor | None) -> Tensor:
        """Add up slices of a sum."""
        if before is None:
            return tensor
        total = self._builder.op("AddV2", [before, tensor], tensor.shape)
        self._sizes.add_like([total], [tensor])
        return total

    def _picked(
        self, lookup: Operation, is_in: Any, before: Sequence[Tensor]
    ) -> Tensor:
        """Return the rows that were found so far, and zeros elsewhere."""
        (rows,) = lookup.outputs
        builder, mask = self._builder, is_in
        for _ in range((rows.shape.rank or 0) - (mask.shape.rank or 0)):
            shape = [*mask.shape, 1]
            mask = builder.op("ExpandDims", [mask, -1], shape)
        if not before:
            found = builder.only_if(mask, rows)
        else:
            found = builder.op("SelectV2", [mask, rows, *before], rows.shape)
        self._sizes.add_like([found], [rows])
        return found

    def _follow(self, first: int, last: Sequence[Event]) -> None:
        """Let what was added from a position on follow other events."""
        for event in self._builder.events[first:] if last else ():
            self._before[event] += last
