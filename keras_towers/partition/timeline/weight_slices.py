"""Large weights in shards, gathered, used, exchanged and updated in slices.

A gathered weight takes the memory that shards save, and so does its gradient.
If one is larger than ``gather_bytes``, its operations run on one slice after
another where they can, along the axis that towers divide::

    y = x @ w                    y = concat([x @ gather(w, k) for k in slices])
    dx = dy @ transpose(w)       dx = sum(dy[:, k] @ transpose(gather(w, k)))
    dw = scatter(x.T @ dy)       dw[k] = scatter(x.T @ dy[:, k])
    w -= rate * dw               w[k] -= rate * dw[k]

Along which axes an operation can run on slices is what its labels say, by which
towers divide it. Lookups of rows, and their gradients, run on slices of the
rows, too. Each slice is gathered and exchanged as a weight of its own is, so
that the timeline places it within ``gather_bytes``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.partition.timeline.axis_slices import (
    Cut,
    Slicer,
    axes_of_operation,
)
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.timeline.gathers import gathers_variables
from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Program,
    Tensor,
    depends_on_batch,
    prune,
    with_inputs,
)
from keras_towers.partition.ir.reasons import asserted
from keras_towers.partition.layout.resources import type_of_content
from keras_towers.partition.ir.tensor_sizes import TensorSizes

# A slice has at least so many bytes, and a weight at most so many slices: each
# of them is a level of the step, with operations of its own.
_LEAST_BYTES = 2**16
_MOST_SLICES = 16
# The part of the gathered bytes that one slice may take, as of other weights.
_PARTS_AT_A_TIME = 4
# What writes a variable, and what adds its input to the value before.
_WRITES = {
    "AssignVariableOp": None,
    "AssignAddVariableOp": "AddV2",
    "AssignSubVariableOp": "Sub",
}
# The label of the rows that a lookup picks, or to which it adds up.
_ROWS = object()

_Axes: TypeAlias = dict[Tensor, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Use:
    """An operation that runs on slices.

    Attributes:
        label: the label of the axis that is cut.
        inputs: the axis of each input; None: it is not cut.
        outputs: the axis of each output; None: slices are added up.
    """

    label: Hashable
    inputs: Sequence[int | None]
    outputs: Sequence[int | None]


@dataclasses.dataclass(frozen=True, eq=False)
class _Gradient:
    """A gradient that is exchanged in slices, and the update with it.

    Attributes:
        exchange: the exchange.
        cut: how its axis is cut.
        chain: the operations that compute it, from the first one that runs on
            slices.
        updates: the operations that use it, and can run on slices as well.
    """

    exchange: Exchange
    cut: Cut
    chain: Mapping[Operation, _Use]
    updates: Mapping[Operation, _Use]


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
    plan = _Plan(program, sizes, gather_bytes, xla)
    if not plan.gathers and not plan.gradients:
        return program
    return _Slicing(program, sizes, plan).program()


class _Plan:
    """What of a program runs on slices.

    Args:
        program: as for ``in_slices``, like the others.
        sizes: see there.
        gather_bytes: see there.
        xla: see there.

    Attributes:
        gathers: the gathers of large weights, and how each is cut.
        uses: the operations that use them.
        gradients: the large gradients.
    """

    def __init__(
        self,
        program: Program,
        sizes: TensorSizes,
        gather_bytes: int,
        xla: bool,
    ):
        self._program, self._sizes, self._most = program, sizes, gather_bytes
        self._users: dict[Tensor, list[Event]] = {}
        for event in program.events:
            for tensor in event.used:
                self._users.setdefault(tensor, []).append(event)
        self._results = {*program.results}
        self.gathers: dict[Tensor, tuple[Exchange, Cut]] = {}
        self.uses: dict[Operation, _Use] = {}
        self.gradients: list[_Gradient] = []
        for exchange in program.exchanges:
            if gathers_variables(exchange):
                self._add_gather(exchange)
            elif exchange.kind == "scatter" and exchange.units is not None:
                self._add_gradient(exchange, xla)

    def _cut_of(self, exchange: Exchange, whole: Tensor) -> Cut | None:
        """Return how a large weight, or its gradient, is cut."""
        given, result = exchange.given.shape, exchange.result.shape
        size = self._sizes.bytes_of(whole)
        known = given.is_fully_defined() and result.is_fully_defined()
        if not known or "columns" in exchange.over or size <= self._most:
            return None
        axis = exchange.axis
        own, rows = sorted((int(given[axis]), int(result[axis])))
        if own == 0 or rows % own or rows == own:
            # Towers have different numbers of rows.
            return None
        at_a_time = max(self._most // _PARTS_AT_A_TIME, _LEAST_BYTES)
        number = min(-(-size // at_a_time), _MOST_SLICES, own)
        return Cut(own, rows // own, number) if number > 1 else None

    def _add_gather(self, exchange: Exchange) -> None:
        whole, cut = exchange.result, self._cut_of(exchange, exchange.result)
        if cut is None or whole in self._results:
            return
        uses: dict[Operation, _Use] = {}
        for user in self._users.get(whole, ()):
            use = None
            if isinstance(user, Operation) and depends_on_batch(user.outputs):
                others = [t for t in user.inputs if t in self.gathers]
                is_only = user.inputs.count(whole) == 1 and not others
                index = user.inputs.index(whole)
                use = _use_of(user, index, exchange.axis) if is_only else None
            if use is None:
                return
            uses[user] = use
        self.gathers[whole] = exchange, cut
        self.uses.update(uses)

    def _add_gradient(self, exchange: Exchange, xla: bool) -> None:
        cut = self._cut_of(exchange, exchange.given)
        chain = None if cut is None else self._chain_of(exchange)
        if cut is None or not chain:
            return
        updates = {} if xla else self._updates_with(exchange)
        self.gradients.append(_Gradient(exchange, cut, chain, updates))

    def _chain_of(self, exchange: Exchange) -> dict[Operation, _Use] | None:
        """Return the operations that compute slices of a large gradient."""
        chain: dict[Operation, _Use] = {}
        waiting = [(exchange.given, exchange.axis)]
        made = {exchange.given}
        while waiting:
            tensor, axis = waiting.pop()
            operation = tensor.operation
            if operation is None or tensor in self._results:
                return None
            use = _use_for(operation, axis)
            if use is None or operation in self.uses:
                return None
            if chain.setdefault(operation, use).outputs != use.outputs:
                return None
            if _reduces(operation, use):
                continue
            for given, at in zip(operation.inputs, use.inputs, strict=True):
                if at is not None and given not in made:
                    made.add(given)
                    waiting.append((given, at))
        inside: set[Event] = {exchange, *chain}
        used = [user for tensor in made for user in self._users[tensor]]
        return chain if inside.issuperset(used) else None

    def _updates_with(self, exchange: Exchange) -> dict[Operation, _Use]:
        """Return the operations that update a weight by its gradient."""
        cut: _Axes = {exchange.result: exchange.axis}
        handles: _Axes = {}
        updates: dict[Operation, _Use] = {}
        count = -1
        while count < len(updates):
            count = len(updates)
            for operation in self._program.operations:
                if operation in updates:
                    continue
                use = self._update_of(operation, cut, handles)
                if use is None:
                    continue
                updates[operation] = use
                for tensor, axis in zip(
                    operation.outputs, use.outputs, strict=True
                ):
                    if axis is not None:
                        cut[tensor] = axis
                if operation.type in _WRITES:
                    handles[operation.inputs[0]] = asserted(use.inputs[1])
        return updates

    def _update_of(
        self, operation: Operation, cut: _Axes, handles: _Axes
    ) -> _Use | None:
        """Return how an operation runs on slices of what is cut already."""
        inputs = operation.inputs
        if operation.type == "ReadVariableOp":
            axis = handles.get(inputs[0]) if operation.of_update else None
            return None if axis is None else _Use(None, [None], [axis])
        if operation.type in _WRITES:
            handle, value = inputs
            axis = cut.get(value) if "towers" in handle.axes else None
            is_same = handles.get(handle, axis) == axis
            fits = axis is not None and is_same
            return _Use(None, [None, axis], []) if fits else None
        first = next((k for k, t in enumerate(inputs) if t in cut), None)
        is_of_shards = not depends_on_batch(operation.outputs)
        if first is None or not is_of_shards or operation.is_repeated:
            return None
        use = _use_of(operation, first, cut[inputs[first]])
        if use is None or use.label is _ROWS:
            return None
        pairs = zip(inputs, use.inputs, strict=True)
        fits = all(cut.get(tensor, axis) == axis for tensor, axis in pairs)
        return use if fits else None


class _Slicing:
    """Writes a program in which operations run on slices.

    Args:
        program: the program.
        sizes: as for ``in_slices``.
        plan: what of it does.
    """

    def __init__(self, program: Program, sizes: TensorSizes, plan: _Plan):
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
        self._waiting: dict[_Gradient, list[Operation]] = {}
        self._used_last: dict[Tensor, Event] = {}
        self._chains: dict[Operation, _Gradient] = {}
        self._updates: dict[Operation, _Gradient] = {}
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
        for index, part in enumerate(cut.parts):
            changed = self._exchange_of(exchange, cut, index, given, part=part)
            slices.append(changed.result)
        self._slices[exchange.result] = cut, exchange.axis, slices

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
        axis, shape = exchange.axis, [*exchange.result.shape]
        shape[axis] = (of_result or cut).size(index)
        result = dataclasses.replace(
            exchange.result, shape=tf.TensorShape(shape)
        )
        self._sizes.add_changed(result, exchange.result, axis, [shape[axis]])
        whole = [*exchange.result.shape]
        whole[axis] = cut.size(index)
        new = dataclasses.replace(
            exchange,
            given=given,
            result=result,
            sizes=whole,
            units=cut.towers,
            **changes,
        )
        self._builder.events.append(new)
        self._stands_for(exchange, new)
        return new

    def _use(self, operation: Operation, use: _Use) -> None:
        """Run an operation that uses slices of a weight."""
        whole = next(t for t in operation.inputs if t in self._plan.gathers)
        _, cut = self._plan.gathers[whole]
        self._write_updates_before(operation)
        slices: list[list[Tensor]] = [[] for _ in operation.outputs]
        totals: list[Tensor] = []
        last: Sequence[Event] = ()
        for index in range(cut.number):
            first = len(self._builder.events)
            copy, is_in = self._on_slice(operation, use, cut, index)
            for of_slices, tensor in zip(slices, copy.outputs, strict=True):
                of_slices.append(tensor)
            if use.label is _ROWS:
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
        use: _Use,
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
        if use.label is _ROWS:
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
        use: _Use,
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
            shape = tensor.shape.as_list()
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

    def _exchange(self, gradient: _Gradient) -> None:
        """Compute and exchange slices of a gradient, one after another."""
        exchange, cut = gradient.exchange, gradient.cut
        operations = [o for o in self._program.operations if o in gradient.chain]
        for operation in operations:
            self._write_updates_before(operation)
        axis = exchange.axis
        slices: list[Tensor] = []
        last: Sequence[Event] = ()
        for index in range(cut.number):
            begin = len(self._builder.events)
            found: dict[Tensor, Tensor] = {}
            for operation in operations:
                use = gradient.chain[operation]
                copy, _ = self._on_slice(operation, use, cut, index, found)
                found.update(zip(operation.outputs, copy.outputs, strict=True))
                self._stands_for(operation, copy)
            first, count = asserted(exchange.rows)
            builder, (_, number) = self._builder, cut.parts[index]
            rows = [
                builder.compute_size(
                    "Mul",
                    builder.compute_size("FloorDiv", size, cut.own),
                    number,
                )
                for size in (self._whole(first), self._whole(count))
            ]
            new = self._exchange_of(
                exchange,
                cut,
                index,
                found[exchange.given],
                cut.of_tower,
                rows=(rows[0], rows[1]),
            )
            self._follow(begin, last)
            last = [new]
            slices.append(new.result)
        self._slices[exchange.result] = cut.of_tower, axis, slices

    # ---- updates -------------------------------------------------------------

    def _write_updates_before(
        self, event: Event, gradient: _Gradient | None = None
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
                for operation in operations:
                    use = gradient.updates[operation]
                    made = self._update(operation, use, gradient, index)
                    for tensor, axis, own in zip(
                        operation.outputs, use.outputs, made, strict=True
                    ):
                        if axis is None:
                            sums[tensor].append(own)
                            continue
                        cut = gradient.cut.of_tower
                        found = self._slices.setdefault(
                            tensor, (cut, axis, [])
                        )
                        found[-1].append(own)
            for tensor, terms in sums.items():
                total = self._builder.op("AddN", terms, tensor.shape)
                self._tensors[tensor] = total

    def _update(
        self, operation: Operation, use: _Use, gradient: _Gradient, index: int
    ) -> Sequence[Tensor]:
        """Add an operation of an update on a slice; return its outputs."""
        cut, builder = gradient.cut.of_tower, self._builder
        builder.name, builder.of_update = operation.name, operation.of_update
        try:
            if operation.type == "ReadVariableOp":
                read = self._read(operation, operation.inputs[0], gradient)
                (axis,) = use.outputs
                axis = asserted(axis)
                return [self._slicer.slice_of(read, axis, cut, index)]
            if operation.type in _WRITES:
                axis = asserted(use.inputs[1])
                self._write(operation, axis, gradient, index)
                return []
            copy, _ = self._on_slice(operation, use, cut, index)
            self._stands_for(operation, copy)
            return copy.outputs
        finally:
            builder.of_update = False

    def _read(
        self, event: Operation, handle: Tensor, gradient: _Gradient
    ) -> Tensor:
        """Read a variable once more, after earlier slices are written."""
        dtype, shape = type_of_content(handle)
        (value,) = self._builder.add(
            "ReadVariableOp", [handle], {"dtype": dtype}, [(dtype, shape)]
        )
        self._in_order(event, handle)
        # What it reads is changed once the gradient is there: no slice of the
        # weight is gathered then.
        self._before[self._builder.last] += self._events[gradient.exchange][-1:]
        return value

    def _write(
        self, operation: Operation, axis: int, gradient: _Gradient, index: int
    ) -> None:
        """Write a slice of a variable."""
        builder, cut = self._builder, gradient.cut.of_tower
        handle, value = operation.inputs
        own = self._slice(value, axis, cut, index)
        adds = _WRITES[operation.type]
        if adds is not None:
            read = self._read(operation, handle, gradient)
            before = self._slicer.slice_of(read, axis, cut, index)
            own = builder.op(adds, [before, own], own.shape)
        begin = [0] * (own.shape.rank or 0)
        begin[axis], count = cut.parts[index]
        end = own.shape.as_list()
        end[axis] = begin[axis] + count
        ends = [builder.constant(e, tf.int32) for e in (begin, end)]
        ones = builder.constant([1] * len(begin), tf.int32)
        masks = "begin end ellipsis new_axis shrink_axis".split()
        builder.add(
            "ResourceStridedSliceAssign",
            [handle, *ends, ones, own],
            {
                "T": own.dtype,
                "Index": tf.int32,
                **{f"{mask}_mask": 0 for mask in masks},
            },
            (),
            has_effect=True,
        )
        self._in_order(operation, handle)

    def _in_order(self, event: Operation, handle: Tensor) -> None:
        """Let the last operation follow what has used a variable before."""
        last = self._builder.last
        if handle in self._used_last:
            self._before[last].append(self._used_last[handle])
        self._used_last[handle] = last
        self._stands_for(event, last)


# ---- how operations run on slices --------------------------------------------


def _use_of(operation: Operation, index: int, axis: int) -> _Use | None:
    """Return how an operation runs on slices of an input.

    Args:
        operation: the operation.
        index: the index of the input.
        axis: the axis of the input that is cut.
    """
    if operation.type == "GatherV2" and index == 0 and axis == 0:
        return _of_rows(operation)
    found = axes_of_operation(operation)
    label = None if found is None else found.label_of_input(index, axis)
    return None if label is None else _with_label(operation, label)


def _use_for(operation: Operation, axis: int) -> _Use | None:
    """Return how an operation computes slices of its only output."""
    if len(operation.outputs) != 1 or operation.is_repeated:
        return None
    if operation.type == "UnsortedSegmentSum" and axis == 0:
        return _of_rows(operation)
    found = axes_of_operation(operation)
    label = None if found is None else found.label_of_output(0, axis)
    return None if label is None else _with_label(operation, label)


def _with_label(operation: Operation, label: Hashable) -> _Use:
    found = axes_of_operation(operation)
    assert found is not None
    inputs = range(len(operation.inputs))
    outputs = range(len(operation.outputs))
    return _Use(
        label,
        [found.axis_of_input(k, label) for k in inputs],
        [found.axis_of_output(k, label) for k in outputs],
    )


def _of_rows(operation: Operation) -> _Use | None:
    """Return how a lookup of rows, or its gradient, runs on slices of rows."""
    others = [None] * (len(operation.inputs) - 1)
    if operation.type == "UnsortedSegmentSum":
        return _Use(_ROWS, [None, *others], [0])
    along = operation.inputs[2].operation
    is_first = (
        along is not None
        and along.type == "Const"
        and not tf.make_ndarray(along.attributes["value"].tensor).any()
    )
    has_batch = operation.attributes["batch_dims"].i
    ranks = [operation.inputs[1].shape.rank, operation.outputs[0].shape.rank]
    is_known = is_first and None not in ranks and not has_batch
    return _Use(_ROWS, [0, *others], [None]) if is_known else None


def _reduces(operation: Operation, use: _Use) -> bool:
    """Whether an operation adds up rows, so that its inputs are no gradient."""
    if use.label is _ROWS:
        return True
    found = axes_of_operation(operation)
    return found is not None and bool(found.factors.summed)
