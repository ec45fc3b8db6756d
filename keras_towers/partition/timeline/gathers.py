"""When a step gathers weights in shards, within ``gather_bytes``.

A gathered weight takes the memory that shards save. So it is gathered right
before the level that uses it. If there is room at all levels up to a later use,
such as that in the backward pass, the tower keeps it; otherwise it is gathered
again. In PyTorch's FSDP this is "reshard after forward".
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Program,
    Tensor,
    is_pure,
    with_inputs,
)
from keras_towers.partition.ir.reasons import asserted
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.timeline import Levels, Timeline


@dataclasses.dataclass
class Whole:
    """A gathered variable, and the levels between which a tower keeps it.

    Attributes:
        size: its bytes.
        level: the level at whose end it is gathered.
        last: the last level that uses it, so far.
        tensor: the whole.
        derived: what has been computed from it, as from the whole of the
            exchange in the program.
    """

    size: int
    level: int
    last: int
    tensor: Tensor
    derived: dict[Tensor, Tensor] = dataclasses.field(default_factory=dict)


class Gathers:
    """Gathers variables at the ends of levels, within a budget of bytes.

    One level may gather a quarter of the budget. Together with the level
    before, that leaves half of it for variables that are kept. At the level
    that gathers a variable larger than this quarter, no other one is gathered.
    But towers keep those that they hold, and may exceed the budget. A variable
    larger than the whole budget comes in slices where operations can take these
    (``weight_slices.py``).

    Args:
        budget: the bytes of gathered wholes at any level.
    """

    def __init__(self, budget: int):
        self._budget = budget
        self._newest: dict[Exchange, Whole] = {}
        # By level: the bytes that exist there, and what is gathered at its end.
        self._held: collections.Counter[int] = collections.Counter()
        self._gathered: dict[int, list[Whole]] = {}

    def find(self, exchange: Exchange, near: int) -> Whole | None:
        """Return a gathered variable that can be kept until a level, or None.

        Args:
            exchange: what gathers it, in the program.
            near: the level of the inputs of the operation that uses it.

        Returns:
            The whole; None: there is none, or no room to keep it.
        """
        whole = self._newest.get(exchange)
        if whole is None:
            return None
        first, last = whole.last + 1, max(near, whole.last)
        # Others have to find room beside it where it is used.
        limits = dict.fromkeys(range(first, last), self._budget)
        if last >= first:
            limits[last] = self._budget // 2
        if not self._has_room(whole.size, limits):
            return None
        self._held.update(dict.fromkeys(limits, whole.size))
        whole.last = last
        return whole

    def level_for(self, size: int, near: int, earliest: int) -> int:
        """Return the level at whose end a variable is to be gathered.

        Args:
            size: the bytes of the whole.
            near: the level of the inputs of the operation that uses it.
            earliest: the level of its rows.
        """
        level = max(near - 1, earliest)
        # The next one may have to be gathered at the level that uses this one.
        limits = {level: self._budget, level + 1: self._budget * 3 // 4}
        while not self._may_gather(size, level, limits):
            if level >= near and not self._gathered.get(level):
                # Nothing would wait for a later level.
                break
            level += 1
            limits = dict.fromkeys((level, level + 1), self._budget)
        return level

    def add(
        self, exchange: Exchange, size: int, level: int, tensor: Tensor
    ) -> Whole:
        """Record that a variable is gathered at the end of a level."""
        whole = Whole(size, level, level + 1, tensor)
        self._newest[exchange] = whole
        self._gathered.setdefault(level, []).append(whole)
        self._held.update(dict.fromkeys((level, level + 1), size))
        return whole

    def _may_gather(
        self, size: int, level: int, limits: dict[int, int]
    ) -> bool:
        there = sum(whole.size for whole in self._gathered.get(level, ()))
        fits = not there or there + size <= self._budget // 4
        return fits and self._has_room(size, limits)

    def _has_room(self, size: int, limits: dict[int, int]) -> bool:
        """Whether a variable fits at each of some levels, or is alone there."""
        return all(
            not self._held[level] or self._held[level] + size <= most
            for level, most in limits.items()
        )


def gathers_variables(event: Event) -> TypeGuard[Exchange]:
    """Whether an event gathers a variable in shards."""
    return (
        isinstance(event, Exchange)
        and event.kind == "gather"
        and "micro_batches" not in event.given.axes
    )


def place_earliest(
    program: Program, sizes: TensorSizes, budget: int
) -> Timeline:
    """Return a timeline with everything as early as possible, but for gathers.

    Args:
        program: the program.
        sizes: the sizes of its tensors; gets those of what is added.
        budget: the bytes of gathered variables at any level.
    """
    return _Placing(program, sizes, budget).timeline()


class _Placing:
    """Places events in the order of a program, and gathers where it is needed.

    Args:
        program: as for ``place_earliest``, like the others.
        sizes: see there.
        budget: see there.
    """

    def __init__(self, program: Program, sizes: TensorSizes, budget: int):
        self._program, self._sizes = program, sizes
        self._levels = Levels(program.before)
        self._gathers = Gathers(budget)
        self._events: list[Event] = []
        # The gather that a tensor comes from, and from nothing else.
        self._gather_of: dict[Tensor, Exchange] = {}
        self._firsts: dict[Exchange, Whole] = {}
        # What operations use, where it was gathered again.
        self._inputs: dict[Operation, Sequence[Tensor]] = {}
        self._rounds = collections.defaultdict[str, list[Exchange]](list)
        for exchange in program.exchanges:
            self._rounds[exchange.round].append(exchange)

    def timeline(self) -> Timeline:
        """Return the timeline."""
        for event in self._program.events:
            gather = event if gathers_variables(event) else self._joins(event)
            if gather is None:
                self._place_user(event)
            else:
                # It waits for its users.
                self._gather_of.update(dict.fromkeys(event.made, gather))
        for tensor in self._program.results:
            self._first(tensor)
        timeline = Timeline(self._program, {}).reordered(
            self._events, self._levels.of_events
        )
        if self._inputs:
            timeline, _ = timeline.with_inputs(self._inputs, self._sizes)
        return timeline

    def _joins(self, event: Event) -> Exchange | None:
        """Return the gather of which an event is a part, or None.

        What has been added to it joins the blocks of a whole, for example.
        """
        if isinstance(event, Exchange) or not is_pure(event):
            return None
        of = self._gather_of
        gathers = {
            of.get(t) for t in event.inputs if t in of or not _is_free(t)
        }
        is_added = event.is_repeated or event.source is None
        return gathers.pop() if is_added and len(gathers) == 1 else None

    def _place_user(self, event: Event) -> None:
        """Place an event, after gathers of what it uses."""
        levels, gather_of = self._levels, self._gather_of
        if isinstance(event, Exchange):
            for tensor in event.used:
                self._first(tensor)
            together = self._rounds[event.round] if event.round else [event]
            self._place(event, max(map(levels.earliest, together)))
            return
        own = [levels.of(t) for t in event.inputs if t not in gather_of]
        near = max(own, default=0)
        inputs = [self._near(tensor, near) for tensor in event.inputs]
        if inputs != [*event.inputs]:
            self._inputs[event] = inputs
            # Its level follows from them.
            for tensor in inputs:
                near = max(near, levels.of(tensor))
        self._place(event, near)

    def _place(self, event: Event, least: int = 0) -> None:
        self._levels.place(event, least)
        self._events.append(event)

    def _near(self, tensor: Tensor, level: int) -> Tensor:
        """Return a tensor, or what comes from a whole gathered near a level."""
        gather = self._gather_of.get(tensor)
        if gather is None:
            return tensor
        whole = self._gathers.find(gather, level)
        if whole is None:
            whole = self._gathered(gather, level)
        return self._derived(whole, tensor, gather)

    def _first(self, tensor: Tensor, near: int = 0) -> None:
        """Gather what a tensor comes from, unless it has been gathered."""
        gather = self._gather_of.get(tensor)
        if gather is None:
            return
        if gather not in self._firsts:
            self._gathered(gather, near)
        self._derived(self._firsts[gather], tensor, gather)

    def _gathered(self, gather: Exchange, near: int) -> Whole:
        """Gather a whole near a level."""
        levels, exchange = self._levels, gather
        # It may gather what columns have gathered of their parts.
        if gather not in self._firsts:
            for tensor in gather.used:
                self._first(tensor, near - 1)
        else:
            used = [self._near(tensor, near - 1) for tensor in gather.used]
            exchange = with_inputs(gather, used)
        size = self._sizes.bytes_of(gather.result)
        earliest = levels.earliest(exchange)
        level = self._gathers.level_for(size, near, earliest)
        self._place(exchange, level)
        self._sizes.add_like([exchange.result], [gather.result])
        whole = self._gathers.add(gather, size, level, exchange.result)
        self._firsts.setdefault(gather, whole)
        return whole

    def _derived(
        self, whole: Whole, tensor: Tensor, gather: Exchange
    ) -> Tensor:
        """Return what a tensor is of a whole, which another gather may have."""
        if tensor is gather.result:
            return whole.tensor
        if tensor not in whole.derived:
            operation = asserted(tensor.operation)
            inputs = [
                self._derived(whole, t, gather)
                if self._gather_of.get(t) is gather
                else t
                for t in operation.inputs
            ]
            copy = operation
            if inputs != [*operation.inputs]:
                copy = with_inputs(operation, inputs)
                self._sizes.add_like(copy.outputs, operation.outputs)
            self._place(copy)
            pairs = zip(operation.outputs, copy.outputs, strict=True)
            whole.derived.update(pairs)
        return whole.derived[tensor]


def _is_free(tensor: Tensor) -> bool:
    """Whether a tensor is a constant, or a size, which exists anywhere."""
    return tensor.operation is not None and tensor.operation.is_repeated


def gathered_bytes(timeline: Timeline) -> list[int]:
    """Return the bytes of gathered variables that a tower has at each level.

    They are the variables that the level uses, keeps, or gathers at its end.
    """
    last: dict[Tensor, int] = {}
    for event in timeline.events:
        level = timeline.levels[event]
        last |= dict.fromkeys(event.used, level)
    sizes = [0] * (timeline.number_of_levels + 1)
    for exchange in timeline.program.exchanges:
        if not gathers_variables(exchange):
            continue
        result, level = exchange.result, timeline.levels[exchange]
        count = result.shape.num_elements()
        size = result.dtype.size * (0 if count is None else count)
        for held in range(level, last.get(result, level + 1) + 1):
            sizes[held] += size
    return sizes
