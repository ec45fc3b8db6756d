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
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

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
from keras_towers.partition.timeline.sliced_weights.axis_slices import Cut
from keras_towers.partition.timeline.sliced_weights.slice_writer import (
    SliceWriter,
)
from keras_towers.partition.timeline.sliced_weights.sliced_uses import (
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


class _Slicing(SliceWriter):
    """Writes a program in which operations run on slices.

    Args:
        program: the program.
        sizes: as for ``in_slices``.
        plan: what of it does.
    """

    def __init__(self, program: Program, sizes: TensorSizes, plan: SlicePlan):
        super().__init__(program, sizes)
        self._plan = plan
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
                total = totals[k]
            else:
                total = self._slicer.joined(slices[k], axis, cut)
            self._tensors[tensor] = total

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
