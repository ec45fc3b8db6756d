"""A timeline: when a program computes and exchanges what.

Every exchange ends a level: operations that use its result belong to later
levels. A level has operations that run once, a function that every tower runs,
and at its end exchanges: a round, in ``describe()``. Towers read their copies
of variables before the function, and update them after it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Phase,
    Program,
    Tensor,
    changed_program,
    computed_after,
    is_repeated,
    unrepeated,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The memory and the work of a step.

    Attributes:
        bytes: the peak bytes of a tower, for an assumed batch.
        parts: the number of micro-batches of a tower.
        shared: the peak bytes of all towers that share memory, while ranks
            exchange.
        rounds: the bytes that ranks exchange at a time, by kind of exchange, at
            several times.
        recomputed: the number of operations that run again, because their
            results are not kept.
        work: their work, as a fraction of the work of a step without them.
        saved: the bytes that a tower saves by them.
        multiplications: the work of a step, as an estimated number of
            multiplications.
    """

    bytes: int = 0
    parts: int = 1
    shared: int = 0
    rounds: Sequence[Mapping[str, int]] = ()
    recomputed: int = 0
    work: float = 0.0
    saved: int = 0
    multiplications: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """A program, and when it does what.

    Attributes:
        program: the program, with what it computes or gathers again. Its events
            are in the order of levels and phases.
        levels: the level of each of its events that is not repeated.
        waits: by operation: what it waits for, of its section, to take no
            memory before they have freed theirs.
        is_paced: whether a level also waits for the exchanges of the level two
            before it.
        plan: what it takes.
    """

    program: Program
    levels: Mapping[Event, int]
    waits: Mapping[Operation, Sequence[Operation]] = dataclasses.field(
        default_factory=dict
    )
    is_paced: bool = False
    plan: StepPlan = StepPlan()

    @functools.cached_property
    def events(self) -> Sequence[Event]:
        """Its events in order, without repeated operations."""
        return [e for e in self.program.events if not is_repeated(e)]

    @functools.cached_property
    def _of_tensors(self) -> dict[Tensor, int]:
        return {
            tensor: level + 1 if isinstance(event, Exchange) else level
            for event, level in self.levels.items()
            for tensor in event.made
        }

    def level_of(self, tensor: Tensor) -> int:
        """Return the first level on which a tensor may be used."""
        return level_of(tensor, self._of_tensors)

    @property
    def number_of_levels(self) -> int:
        """The number of levels."""
        return 1 + max(self.levels.values(), default=0)

    @functools.cached_property
    def by_level(
        self,
    ) -> Sequence[tuple[Sequence[Operation], Sequence[Exchange]]]:
        """The operations and the exchanges of each level."""
        levels: list[tuple[list[Operation], list[Exchange]]]
        levels = [([], []) for _ in range(self.number_of_levels)]
        for event in self.events:
            operations, exchanges = levels[self.levels[event]]
            if isinstance(event, Exchange):
                exchanges.append(event)
            else:
                operations.append(event)
        return levels

    def reordered(
        self, events: Iterable[Event], levels: Mapping[Event, int]
    ) -> Timeline:
        """Return a timeline with events on other levels, in this order."""
        program = dataclasses.replace(
            self.program, events=in_order(events, levels)
        )
        return dataclasses.replace(self, program=program, levels=levels)

    def with_inputs(
        self, inputs: Mapping[Operation, Sequence[Tensor]], sizes: TensorSizes
    ) -> tuple[Timeline, Mapping[Event, Event]]:
        """Return a timeline in which operations have other inputs.

        Args:
            inputs: the inputs of those that have others.
            sizes: the sizes of its tensors; gets those of what is new.

        Returns:
            The timeline, and by each event the one in its place.
        """
        events = in_order(self.program.events, self.levels, inputs)
        program = changed_program(
            dataclasses.replace(self.program, events=events),
            lambda o: {"inputs": inputs[o]} if o in inputs else {},
        )
        new: dict[Any, Any] = dict(zip(events, program.events, strict=True))
        for event, own in new.items():
            sizes.add_like(own.made, event.made)
        waits = {
            new[o]: [new[other] for other in others]
            for o, others in self.waits.items()
        }
        levels = {new[event]: level for event, level in self.levels.items()}
        timeline = dataclasses.replace(
            self, program=program, levels=levels, waits=waits
        )
        return timeline, new


def level_of(tensor: Tensor, levels: dict[Tensor, int]) -> int:
    """Return the first level on which a tensor may be used.

    A repeated operation is wherever its inputs are.

    Args:
        tensor: the tensor.
        levels: those of tensors that other operations make; gets this one.
    """
    if tensor not in levels:
        source = tensor.operation
        repeats = source is not None and source.is_repeated
        inputs = source.inputs if source and repeats else ()
        levels[tensor] = max((level_of(t, levels) for t in inputs), default=0)
    return levels[tensor]


class Levels:
    """Places events on levels, as early as is possible.

    Args:
        before: what comes before what, as in ``Program``.

    Attributes:
        of_events: the levels of the events that were placed.
    """

    def __init__(self, before: Mapping[Event, Sequence[Event]]):
        self._before = before
        self.of_events: dict[Event, int] = {}
        # The levels after which tensors exist.
        self._of_tensors: dict[Tensor, int] = {}

    def of(self, tensor: Tensor) -> int:
        """Return the first level on which a tensor may be used."""
        return level_of(tensor, self._of_tensors)

    def earliest(self, event: Event) -> int:
        """Return the first level on which an event is possible."""
        if isinstance(event, Exchange):
            return max(map(self.of, event.used))
        phase, levels = event.phase, [0]
        for tensor in unrepeated(event.inputs):
            level, is_later = self.of(tensor), computed_after(tensor, phase)
            levels.append(level + 1 if is_later else level)
        for other in self._before.get(event, ()):
            if is_repeated(other):
                continue
            level = self.of_events[other]
            is_later = isinstance(other, Exchange) or other.phase > phase
            levels.append(level + 1 if is_later else level)
        return max(levels)

    def place(self, event: Event, least: int = 0) -> int:
        """Place an event on its first level from a least one on; return it.

        Repeated operations have none.
        """
        level = max(least, self.earliest(event))
        if is_repeated(event):
            return level
        self.of_events[event] = level
        made = level + 1 if isinstance(event, Exchange) else level
        self._of_tensors.update(dict.fromkeys(event.made, made))
        return level


def in_order(
    events: Iterable[Event],
    levels: Mapping[Event, int],
    inputs: Mapping[Operation, Sequence[Tensor]] = MappingProxyType({}),
) -> list[Event]:
    """Return events in the order of their levels.

    In each level come the operations that run once, those of each phase on
    towers, and then the exchanges. Repeated operations, which are on no level,
    come right before their first user.

    Args:
        events: the events.
        levels: the levels of those that are not repeated.
        inputs: the inputs of operations that will have others.
    """
    found = collections.defaultdict[tuple[int, int], list[Event]](list)
    repeated: list[Event] = []
    for event in events:
        if is_repeated(event):
            repeated.append(event)
            continue
        phase = len(Phase) if isinstance(event, Exchange) else event.phase
        found[levels[event], int(phase)].append(event)
    left, ordered = set(repeated), list[Event]()

    def add(event: Event) -> None:
        left.discard(event)
        used = event.used
        if isinstance(event, Operation):
            used = inputs.get(event, used)
        for tensor in used:
            if tensor.operation in left:
                add(tensor.operation)
        ordered.append(event)

    for time in sorted(found):
        for event in found[time]:
            add(event)
    # No event uses them, but the program may return them.
    for event in repeated:
        if event in left:
            add(event)
    return ordered
