"""Large weights in shards, gathered, used, exchanged and updated in slices.

A gathered weight takes the memory that shards save, and so does its gradient.
If one is larger than ``gather_bytes``, its operations run on one slice of rows
after another where they can::

    y = x @ w                 y = sum(x[:, k] @ gather(w[k]) for k in slices)
    dx = dy @ w.T             dx = concat(dy @ gather(w[k]).T for k in slices)
    dw = scatter(x.T @ dy)    dw[k] = scatter(x[:, k].T @ dy)
    w -= rate * dw            w[k] -= rate * dw[k]

Each slice is gathered and exchanged as a weight of its own is, so
that the timeline places it within ``gather_bytes``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
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
    prune,
    with_inputs,
)
from keras_towers.partition.ir.reasons import asserted
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.axis_slices import Cut, Slicer
from keras_towers.partition.timeline.sliced_uses import (
    ROWS,
    WRITES,
    SlicedGradient,
    SlicePlan,
    Use,
)


def in_slices(
    program: Program, sizes: TensorSizes, gather_bytes: int, xla: bool = False
) -> Program:
    """Return a program that uses its largest weights in slices.

    Args:
        program: the program.
        sizes: the sizes of its tensors; gets those of what is added.
        gather_bytes: the bytes of the largest that it uses whole.
        xla: whether XLA compiles it; it then updates whole shards.
    """
    plan = SlicePlan(program, sizes, gather_bytes, xla)
    if not plan.gathers and not plan.gradients:
        return program
    return _Slicing(program, sizes, plan).program()


class _Slicing:
    """Writes a program in which operations run on slices.

    Args:
        program: the program.
        sizes: as for ``in_slices``.
        plan: what of it does.
    """

    def __init__(self, program: Program, sizes: TensorSizes, plan: SlicePlan):
        self._program, self._sizes, self._plan = program, sizes, plan
        self._builder = Builder()
        self._slicer = Slicer(self._builder, sizes)
        # What stands for tensors: others, or slices along an axis.
        self._tensors: dict[Tensor, Tensor] = {}
        self._slices: dict[Tensor, tuple[Cut, int, list[Tensor]]] = {}
        # What stands for events, and what comes before what.
        self._events: dict[Event, list[Event]] = {}
        self._before: dict[Event, list[Event]] = collections.defaultdict(list)
        # Updates that are not written yet, and those that wait for which.
        self._waiting: dict[SlicedGradient, list[Operation]] = {}
        self._ranges: dict[tuple[int, int], Tensor] = {}
        self._used_last: dict[Tensor, Event] = {}
        # What uses slices of a variable that are read when they are gathered.
        self._uses: dict[tuple[Tensor, int], list[Event]]
        self._uses = collections.defaultdict(list)
        self._chains: dict[Operation, SlicedGradient] = {}
        self._updates: dict[Operation, SlicedGradient] = {}
        for gradient in plan.gradients:
            self._chains |= dict.fromkeys(gradient.chain, gradient)
            self._updates |= dict.fromkeys(gradient.updates, gradient)
        self._exchanges = {g.exchange: g for g in plan.gradients}

    def program(self) -> Program:
        """Return the program."""
        for event in self._program.events:
            self._add(event)
        self._write_updates()
        results = [self._whole(tensor) for tensor in self._program.results]
        events = prune(self._builder.events, results)
        kept = {*events}
        before = {
            event: [other for other in others if other in kept]
            for event, others in self._before.items()
            if event in kept
        }
        return dataclasses.replace(
            self._program,
            events=events,
            before=before,
            results=results,
            values={k: self._value(v) for k, v in self._program.values.items()},
        )

    def _value(self, value: Any) -> Any:
        ends = {"local": value.local, "whole": value.whole}
        new = {
            k: self._tensors[t] for k, t in ends.items() if t in self._tensors
        }
        return dataclasses.replace(value, **new) if new else value

    def _add(self, event: Event) -> None:
        """Add an event, or what stands for it."""
        plan = self._plan
        if isinstance(event, Exchange):
            if event in self._exchanges:
                # Its operations have been.
                return
            if event.result in plan.gathers:
                self._gather(*plan.gathers[event.result])
                return
        elif event in self._updates:
            gradient = self._updates[event]
            self._write_updates_before(event, gradient)
            self._waiting.setdefault(gradient, []).append(event)
            return
        elif event in self._chains:
            gradient = self._chains[event]
            if event is gradient.exchange.given.operation:
                self._exchange(gradient)
            return
        elif event in plan.uses:
            self._use(event, plan.uses[event])
            return
        self._keep(event)

    # ---- events that stay ----------------------------------------------------

    def _keep(self, event: Event) -> None:
        self._write_updates_before(event)
        used = [self._whole(tensor) for tensor in event.used]
        kept = event if used == [*event.used] else with_inputs(event, used)
        pairs = zip(event.made, kept.made, strict=True)
        self._sizes.add_like(kept.made, event.made)
        if kept is not event:
            self._tensors.update(pairs)
        self._builder.events.append(kept)
        self._stands_for(event, kept)

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

    # ---- weights -------------------------------------------------------------

    def _gather(self, exchange: Exchange, cut: Cut) -> None:
        """Gather slices of a weight."""
        slices: list[Tensor] = []
        given = self._whole(exchange.given)
        reads = self._plan.variable_read_late(exchange) is not None
        for index, part in enumerate(cut.parts):
            changed = self._exchange_of(
                exchange, cut, index, given, part=part, reads=reads
            )
            slices.append(changed.result)
        self._slices[exchange.result] = cut, 0, slices

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

    def _use(self, operation: Operation, use: Use) -> None:
        """Run an operation that uses slices of a weight."""
        whole = next(t for t in operation.inputs if t in self._plan.gathers)
        gather, cut = self._plan.gathers[whole]
        handle = self._plan.variable_read_late(gather)
        self._write_updates_before(operation)
        slices: list[list[Tensor]] = [[] for _ in operation.outputs]
        totals: list[Tensor] = []
        last: Sequence[Event] = ()
        for index in range(cut.number):
            first = len(self._builder.events)
            copy, is_in = self._on_slice(operation, use, cut, index)
            for of_slices, tensor in zip(slices, copy.outputs, strict=True):
                of_slices.append(tensor)
            if use.label is ROWS:
                totals = [self._picked(copy, is_in, totals)]
            elif None in use.outputs:
                totals = [
                    self._added(tensor, before)
                    for tensor, before in itertools.zip_longest(
                        copy.outputs, totals
                    )
                ]
            self._follow(first, last)
            last = [copy]
            self._stands_for(operation, copy)
            if handle is not None:
                self._uses[handle, index].append(copy)
        for k, (tensor, axis) in enumerate(
            zip(operation.outputs, use.outputs, strict=True)
        ):
            if axis is None:
                total = self._cast(totals[k], tensor.dtype)
                self._sizes.add_like([total], [tensor])
            else:
                total = self._slicer.joined(slices[k], axis, cut)
            self._tensors[tensor] = total

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
                operands = [inside, own, -1]
                shape, dtype = numbers.shape, inputs[2].dtype
                inputs[1] = self._builder.op("SelectV2", operands, shape)
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
        """Add up slices of a sum; 16 bits would round each of them."""
        is_short = tensor.dtype.is_floating and tensor.dtype.size < 4
        term = self._cast(tensor, tf.float32) if is_short else tensor
        if before is None:
            return term
        total = self._builder.op("AddV2", [before, term], term.shape)
        self._sizes.add_like([total], [tensor])
        return total

    def _cast(self, tensor: Tensor, dtype: tf.DType) -> Tensor:
        cast = self._builder.cast(tensor, dtype, is_repeated=False)
        self._sizes.add_like([cast], [tensor])
        return cast

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

    # ---- gradients -----------------------------------------------------------

    def _exchange(self, gradient: SlicedGradient) -> None:
        """Compute and exchange slices of a gradient, one after another."""
        exchange, cut = gradient.exchange, gradient.cut
        chain = gradient.chain
        operations = [o for o in self._program.operations if o in chain]
        for operation in operations:
            self._write_updates_before(operation)
        slices: list[Tensor] = []
        last: Sequence[Event] = ()
        for index in range(cut.number):
            begin = len(self._builder.events)
            found: dict[Tensor, Tensor] = {}
            for operation in operations:
                use = chain[operation]
                copy, _ = self._on_slice(operation, use, cut, index, found)
                found.update(zip(operation.outputs, copy.outputs, strict=True))
                self._stands_for(operation, copy)
            new = self._exchange_of(
                exchange,
                cut,
                index,
                found[exchange.given],
                cut.of_tower,
                rows=self._rows(exchange, cut, index),
            )
            self._follow(begin, last)
            last = [new]
            slices.append(new.result)
        self._slices[exchange.result] = cut.of_tower, 0, slices

    def _rows(
        self, exchange: Exchange, cut: Cut, index: int
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that a tower gets of a slice, as in ``Exchange``."""
        first, count = map(self._whole, asserted(exchange.rows))
        if exchange.axis > 0:
            return first, count
        size, (_, number) = self._builder.compute_size, cut.parts[index]
        first, count = (
            size("Mul", size("FloorDiv", rows, cut.own), number)
            for rows in (first, count)
        )
        return first, count

    # ---- updates -------------------------------------------------------------

    def _write_updates_before(
        self, event: Event, gradient: SlicedGradient | None = None
    ) -> None:
        """Write updates that an event follows.

        Args:
            event: the event.
            gradient: the gradient whose update it is of, if of any. It then
                follows only the sums over all slices.
        """
        others: set[Event] = set()
        made: set[Tensor] = set()
        for own, operations in self._waiting.items():
            if own is not gradient:
                others.update(operations)
            for operation in operations:
                outputs = own.updates[operation].outputs
                made.update(
                    tensor
                    for tensor, axis in zip(
                        operation.outputs, outputs, strict=True
                    )
                    if own is not gradient or axis is None
                )
        before = self._program.before.get(event, ())
        if not (others.isdisjoint(before) and made.isdisjoint(event.used)):
            self._write_updates()

    def _write_updates(self) -> None:
        """Write all updates so far, one slice after another."""
        waiting, self._waiting = self._waiting, {}
        for gradient, operations in waiting.items():
            # What an update adds up is there once all slices are.
            sums = collections.defaultdict[Tensor, list[Tensor]](list)
            for index in range(gradient.cut.number):
                first = len(self._builder.events)
                for operation in operations:
                    use = gradient.updates[operation]
                    made = self._update(operation, gradient, index)
                    for tensor, axis, own in zip(
                        operation.outputs, use.outputs, made, strict=True
                    ):
                        if axis is None:
                            sums[tensor].append(own)
                            continue
                        cut = gradient.cut.of_tower
                        found = self._slices.setdefault(tensor, (cut, axis, []))
                        found[-1].append(own)
                self._follow(first, self._ends_of(gradient, index))
            for write in operations:
                if write.type in WRITES:
                    self._end_writes(write)
            for tensor, terms in sums.items():
                total = self._builder.op("AddN", terms, tensor.shape)
                self._tensors[tensor] = total

    def _ends_of(self, gradient: SlicedGradient, index: int) -> list[Event]:
        """Return what comes before the update of a slice."""
        ends = [self._events[gradient.exchange][index]]
        for handle in gradient.handles:
            ends += self._uses[handle, index]
        return ends

    def _update(
        self, operation: Operation, gradient: SlicedGradient, index: int
    ) -> Sequence[Tensor]:
        """Add an operation of an update on a slice; return its outputs."""
        cut, builder = gradient.cut.of_tower, self._builder
        use = gradient.updates[operation]
        builder.name, builder.of_update = operation.name, operation.of_update
        try:
            if operation.type == "ReadVariableOp":
                return self._read(operation, cut, index)
            if operation.type in WRITES:
                self._write(operation, cut, index)
                return []
            copy, _ = self._on_slice(operation, use, cut, index)
            self._stands_for(operation, copy)
            return copy.outputs
        finally:
            builder.of_update = False

    def _read(self, read: Operation, cut: Cut, index: int) -> Sequence[Tensor]:
        """Read rows of a variable, without a reference to its memory."""
        (value,), (_, count) = read.outputs, cut.parts[index]
        rows = self._numbers(cut, index)
        found = self._builder.add(
            "ResourceGather",
            [*read.inputs, rows],
            {
                "dtype": value.dtype,
                "Tindices": rows.dtype,
                "batch_dims": 0,
                "validate_indices": True,
            },
            [(value.dtype, tf.TensorShape([count, *value.shape[1:]]))],
        )
        self._in_order(read)
        return found

    def _write(self, write: Operation, cut: Cut, index: int) -> None:
        """Write rows of a variable."""
        builder, rows = self._builder, self._numbers(cut, index)
        handle, value = write.inputs
        attributes = {"dtype": value.dtype, "Tindices": rows.dtype}
        operands = [handle, rows, self._slice(value, 0, cut, index)]
        builder.add(
            WRITES[write.type], operands, attributes, (), has_effect=True
        )
        self._in_order(write)

    def _end_writes(self, write: Operation) -> None:
        """Let those that read a variable from now on share its memory.

        TensorFlow gives them copies, once rows of it have been written.
        """
        builder, handle = self._builder, write.inputs[0]
        builder.of_update = write.of_update
        builder.add("DisableCopyOnRead", [handle], {}, (), has_effect=True)
        builder.of_update = False
        self._in_order(write)

    def _numbers(self, cut: Cut, index: int) -> Tensor:
        """Return the numbers of the rows of a tower in a slice."""
        key = cut.parts[index]
        if key not in self._ranges:
            first, count = key
            ends = [first, first + count, 1]
            self._ranges[key] = self._builder.op("Range", ends, (count,))
        return self._ranges[key]

    def _in_order(self, event: Operation) -> None:
        """Let the last operation follow what has used a variable before."""
        last, handle = self._builder.last, event.inputs[0]
        if handle in self._used_last:
            self._before[last].append(self._used_last[handle])
        self._used_last[handle] = last
        self._stands_for(event, last)
