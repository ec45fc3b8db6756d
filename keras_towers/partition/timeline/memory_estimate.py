"""An estimate of the memory of a tower at each time of a step.

Assumptions: operations run in the order of the program; a result takes memory
until its last use; an elementwise operation reuses the memory of an input that
ends there; nothing else takes memory. TensorFlow's kernels need workspaces
besides. ``schedule.py`` makes TensorFlow keep to this order where it matters;
XLA chooses its own order, and fuses operations.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from keras_towers.partition.ir.effects import LOOPS
from keras_towers.partition.ir.list_memory import popped_lists, shared_lists
from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Phase,
    Program,
    Tensor,
    unrepeated,
)
from keras_towers.partition.ir.registry import facts_of
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.timeline import Timeline

ALIKE = 1.02
"""Bytes that differ by a smaller factor are alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """What an event uses, whatever else there is.

    Attributes:
        level: its level.
        used: the tensors that it uses.
        behind: those from which its level repeats what it uses besides.
        kept: those that a tower keeps for it of all micro-batches.
        shares: whether its results are in the memory of others.
        of_shared: whether it uses results of operations that share memory.
        reuses: whether its result may take the memory of an input.
    """

    level: int
    used: Sequence[Tensor]
    behind: Sequence[Tensor]
    kept: Sequence[Tensor]
    shares: bool
    of_shared: bool
    reuses: bool


class MemoryEstimate:
    """Estimates when each tensor of a program takes memory, and how much.

    Args:
        timeline: when a program does what.
        sizes: the sizes of its tensors.
        parts: the number of micro-batches of a tower, which it computes one
            after another in each level.
        sharing: the number of towers that share the memory.

    Attributes:
        events: the operations and exchanges, in order.
        users: by tensor with memory: the indices of the events that use it, or
            another one that has its memory.
        made: the bytes that each event takes, besides those that it reuses.
        reused: for each event the tensor whose memory its result takes.
        live: the bytes that a tower, or those that share memory, have during
            each event.
    """

    def __init__(
        self,
        timeline: Timeline,
        sizes: TensorSizes,
        parts: int = 1,
        sharing: int = 1,
    ):
        self._timeline, self._sizes, self._parts = timeline, sizes, parts
        program = timeline.program
        self._sharing = sharing
        # Towers that share memory hold equal results once.
        alike = ("sum", "gather", "first", "root")
        self._alike: set[Tensor] = {
            e.result for e in program.exchanges if e.kind in alike
        }
        # The bytes of sums over earlier micro-batches, by level.
        self._summed = collections.defaultdict[int, int](int)
        for tensor in summed_tensors(program) if parts > 1 else ():
            level = timeline.level_of(tensor)
            self._summed[level] += sizes.bytes_of(tensor)
        self.events: Sequence[Event] = timeline.events
        # What is computed; repeated tensors and sizes take no memory.
        self._computed = {t for event in self.events for t in event.made}
        level_of = timeline.level_of
        self._uses: dict[Event, _Use] = {
            event: _use_of(event, event.used, timeline.levels[event], level_of)
            for event in self.events
        }
        self._estimate()

    def with_copies(
        self,
        events: Sequence[Event],
        levels: Mapping[Event, int],
        inputs: Mapping[Operation, Sequence[Tensor]],
    ) -> MemoryEstimate:
        """Return the estimate of a timeline with copies of operations.

        Args:
            events: all events, in order.
            levels: the levels of the copies.
            inputs: what operations use in place of their inputs.
        """
        before, found = self._timeline, copy.copy(self)
        made = {t: level for e, level in levels.items() for t in e.made}

        def level_of(tensor: Tensor) -> int:
            level = made.get(tensor)
            return before.level_of(tensor) if level is None else level

        found.events = events
        found._computed = self._computed.union(made)
        found._uses = {**self._uses}
        for event, level in levels.items():
            found._uses[event] = _use_of(event, event.used, level, level_of)
        for operation, used in inputs.items():
            level = before.levels[operation]
            found._uses[operation] = _use_of(operation, used, level, level_of)
        found._estimate()
        return found

    def _estimate(self) -> None:
        program = self._timeline.program
        uses = [self._uses[event] for event in self.events]
        # The tensors that are held for all micro-batches until all are done.
        self._held: set[Tensor] = set()
        if self._parts > 1:
            self._held.update(program.inputs.of_graph)
            self._held.update(*(use.kept for use in uses))
        self._root: dict[Tensor, Tensor] = {}
        # The bytes of lists that grow, and of tensors so far.
        self._grown: dict[Tensor, int] = {}
        self._bytes: dict[Tensor, int] = {}
        for event, use in zip(self.events, uses, strict=True):
            if use.shares and isinstance(event, Operation):
                self._share(event, use.used)
        self._results = set(map(self.rooted, program.results))
        self.users: dict[Tensor, list[int]] = {}
        self._used: list[Sequence[Tensor]] = []
        # By the first event of a level: what the operations use that the level
        # repeats.
        self._taken: dict[int, list[Tensor]] = {}
        have_memory = self._computed.union(program.inputs.of_graph)
        begins, level, users = 0, -1, self.users
        for index, use in enumerate(uses):
            if use.level != level:
                begins, level = index, use.level
            used: Iterable[Tensor] = use.used
            if use.of_shared:
                used = dict.fromkeys(map(self.rooted, used))
            used = [tensor for tensor in used if tensor in have_memory]
            self._used.append(used)
            for tensor in used:
                if tensor in users:
                    users[tensor].append(index)
                else:
                    users[tensor] = [index]
            for tensor in map(self.rooted, use.behind):
                last = users.get(tensor, [-1])[-1]
                if last < begins and tensor in have_memory:
                    self._taken.setdefault(begins, []).append(tensor)
                    users.setdefault(tensor, []).append(begins)
        self._walk(uses)

    def _share(self, event: Operation, given: Sequence[Tensor]) -> None:
        """Note which results of an operation are in the memory of others.

        Args:
            event: the operation.
            given: its inputs.
        """
        if event.type not in LOOPS:
            # Some operations have further inputs, such as a shape.
            for source, result in zip(given, event.outputs, strict=False):
                self._root[result] = self.rooted(source)
            return
        shared = shared_lists(event)
        for source, result in zip(given, event.outputs, strict=True):
            root = self.rooted(shared.get(result, source))
            # A loop changes a list, unless it begins with an empty one, which
            # is repeated where it is used.
            if result in shared:
                self._root[result] = root
            elif result.dtype == tf.variant and root in self._computed:
                self._root[result] = root
                most = self._grown.get(root, self._sizes.bytes_of(root))
                self._grown[root] = max(most, self._sizes.bytes_of(result))

    def _walk(self, uses: Sequence[_Use]) -> None:
        inputs = self._timeline.program.inputs.of_graph
        now = sum(self.bytes_of(t) for t in inputs if t in self.users)
        self.made: list[int] = []
        self.reused: list[Tensor | None] = []
        self.live: list[int] = []
        users, results, bytes_of = self.users, self._results, self.bytes_of
        for index, (event, use) in enumerate(
            zip(self.events, uses, strict=True)
        ):
            ending = [
                tensor
                for tensor in self._used[index]
                if users[tensor][-1] == index and tensor not in results
            ]
            reused = self._reused(event, ending) if use.reuses else None
            if index in self._taken:
                ending = self.ending(index)
            own: Sequence[Tensor] = event.made
            ended = [] if reused is None else [reused]
            if use.shares:
                own = [tensor for tensor in own if tensor not in self._root]
            if isinstance(event, Operation) and event.type in LOOPS:
                # A loop frees elements while it makes others.
                popped = set(map(self.rooted, popped_lists(event)))
                ended += [tensor for tensor in ending if tensor in popped]
            size = sum([bytes_of(tensor) for tensor in own])
            made = max(0, size - sum([bytes_of(tensor) for tensor in ended]))
            self.made.append(made)
            self.reused.append(reused)
            is_exchange = isinstance(event, Exchange)
            before = 0 if is_exchange else self._summed.get(use.level, 0)
            self.live.append(now + made + before)
            now += size - sum([bytes_of(tensor) for tensor in ending])
            for tensor in own:
                if tensor not in users and tensor not in results:
                    now -= bytes_of(tensor)

    def ending(self, index: int) -> list[Tensor]:
        """Return the tensors whose memory becomes free after an event."""
        return [
            tensor
            for tensor in (*self._used[index], *self._taken.get(index, ()))
            if self.users[tensor][-1] == index and tensor not in self._results
        ]

    def rooted(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose memory a tensor shares; often itself."""
        return self._root.get(tensor, tensor)

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes that a tower has of a tensor.

        A tensor that it holds for all micro-batches counts as often.
        """
        size = self._bytes.get(tensor)
        if size is None:
            size = self._bytes[tensor] = self._bytes_of(tensor)
        return size

    def _bytes_of(self, tensor: Tensor) -> int:
        size = self._grown.get(tensor)
        if size is None:
            size = self._sizes.bytes_of(tensor)
        if tensor in self._held and "micro_batches" in tensor.axes:
            size *= self._parts
        if (
            self._sharing > 1
            and "towers" in tensor.axes
            and tensor not in self._alike
        ):
            size *= self._sharing
        return size

    def peak_bytes(self) -> int:
        """Return the peak bytes of a tower, without variables.

        They are of the batch, gathered variables, activations that are kept for
        the backward pass, and gradients.
        """
        return max(self.live, default=0)

    def peak_bytes_over_ranks(self) -> int:
        """Return the peak if ranks exchange while they compute the next level.

        The exchange of a level, and the updates with its results, then take
        memory beside the operations of the next one.
        """
        most, beside, peak = self.peak_bytes(), 0, 0
        for index, event in enumerate(self.events):
            live = self.live[index]
            if isinstance(event, Operation) and event.phase is Phase.TOWERS:
                if peak:
                    beside = max(0, peak - live + self.made[index])
                most, peak = max(most, live + beside), 0
            elif peak or (isinstance(event, Exchange) and event.crosses_ranks):
                peak = max(peak, live)
        return most

    def _reused(self, event: Event, ending: Iterable[Tensor]) -> Tensor | None:
        """Return the input whose memory the result takes over, or None."""
        if isinstance(event, Exchange):
            # Towers are added up in the memory of one of them.
            given = self.rooted(event.given)
            return given if self._sharing > 1 and given in ending else None
        result, sizes = event.outputs[0], self._sizes
        size = sizes.bytes_of(result)
        for tensor in ending:
            is_computed = tensor.operation is not None
            is_like = sizes.bytes_of(tensor) == size
            if is_like and is_computed and tensor.dtype == result.dtype:
                return tensor
        return None


def _use_of(
    event: Event,
    used: Sequence[Tensor],
    level: int,
    level_of: Callable[[Tensor], int],
) -> _Use:
    """Return what an event of a level uses.

    Args:
        event: the event.
        used: the tensors that it uses.
        level: the level.
        level_of: returns the first level on which a tensor may be used.
    """
    repeated = [t for t in used if t.operation and t.operation.is_repeated]
    shares = _shares_memory(event)
    return _Use(
        level,
        used if shares else [*dict.fromkeys(used)],
        [t for t in unrepeated(repeated) if level_of(t) < level],
        _kept_for(event, used, level, level_of),
        shares,
        shares
        or any(t.operation and _shares_memory(t.operation) for t in used),
        event.kind == "sum"
        if isinstance(event, Exchange)
        else facts_of(event.type).memory == "reused",
    )


def _shares_memory(event: Event) -> bool:
    """Whether results of an event are in the memory of others."""
    return isinstance(event, Operation) and (
        event.type in LOOPS or facts_of(event.type).memory == "input"
    )


def _kept_for(
    event: Event,
    used: Sequence[Tensor],
    level: int,
    level_of: Callable[[Tensor], int],
) -> list[Tensor]:
    """Return what a tower keeps of all its micro-batches for an event."""
    if isinstance(event, Exchange):
        used = [event.given] if event.kind == "gather" else []
        return [t for t in used if "micro_batches" in t.axes]
    return [
        tensor
        for tensor in unrepeated(used)
        if "micro_batches" in tensor.axes
        and tensor.operation is not None
        and level_of(tensor) < level
    ]


def rounds_over_ranks(
    timeline: Timeline, sizes: TensorSizes
) -> list[Mapping[str, Sequence[int]]]:
    """Return the bytes of what ranks exchange at a time, by kind of exchange.

    Those of two levels, since the second one does not wait for the first. Sums
    of gradients are a kind of their own.
    """
    levels: dict[int, dict[str, list[int]]] = {}
    for exchange in timeline.program.exchanges:
        if exchange.crosses_ranks:
            is_gradient = exchange.kind == "sum" and exchange.gradient
            kind = "gradient" if is_gradient else exchange.kind
            level = timeline.levels[exchange]
            # Of a slice, less is given than towers have.
            ends = [exchange.result]
            if exchange.part is None:
                ends.append(exchange.given)
            of_kind = levels.setdefault(level, {}).setdefault(kind, [])
            of_kind.append(max(map(sizes.bytes_of, ends)))
    return [
        {
            kind: [*own.get(kind, ()), *following.get(kind, ())]
            for kind in own | following
        }
        for own, following in (
            (own, levels.get(level + 1, {})) for level, own in levels.items()
        )
    ]


def held_tensors(timeline: Timeline) -> set[Tensor]:
    """Return the tensors that a tower keeps of all its micro-batches."""
    levels, level_of = timeline.levels, timeline.level_of
    return {
        tensor
        for event in timeline.events
        for tensor in _kept_for(event, event.used, levels[event], level_of)
    }


def summed_tensors(program: Program) -> set[Tensor]:
    """Return the tensors that are summed over towers."""
    kinds = ("sum", "scatter")
    exchanges = [e for e in program.exchanges if "towers" in e.over]
    return {e.given for e in exchanges if e.kind in kinds}
