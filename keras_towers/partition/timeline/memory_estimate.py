"""An estimate of the memory of a tower at each time of a step.

Assumptions: operations run in the order of the program; a result takes memory
until its last use; an elementwise operation reuses the memory of an input that
ends there; nothing else takes memory. TensorFlow's kernels need workspaces
besides. ``schedule.py`` makes TensorFlow keep to this order where it matters;
XLA chooses its own order, and fuses operations.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

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


class MemoryEstimate:
    """Estimates when each tensor of a program takes memory, and how much.

    Args:
        timeline: when a program does what.
        sizes: the sizes of its tensors.
        parts: the number of micro-batches of a tower, which it computes one
            after another in each level.
        sharing: the number of towers that share the memory.
        inputs: what operations use in place of their inputs.

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
        inputs: Mapping[Operation, Sequence[Tensor]] = MappingProxyType({}),
    ):
        self._timeline, self._sizes, self._parts = timeline, sizes, parts
        program = timeline.program
        self._sharing = sharing
        # Towers that share memory hold equal results once.
        alike = ("sum", "gather", "first", "root")
        self._alike: set[Tensor] = {
            e.result for e in program.exchanges if e.kind in alike
        }
        # The tensors that are held for all micro-batches until all are done.
        self._held: set[Tensor] = set()
        if parts > 1:
            self._held = held_tensors(timeline) | {*program.inputs.of_graph}
        self._root: dict[Tensor, Tensor] = {}
        # The bytes of lists that grow.
        self._bytes: dict[Tensor, int] = {}
        self.events: Sequence[Event] = timeline.events
        self.users: dict[Tensor, list[int]] = {}
        self.made: list[int] = []
        self.reused: list[Tensor | None] = []
        self.live: list[int] = []
        made: set[Tensor] = set()
        for event in self.events:
            made.update(event.made)
            if isinstance(event, Operation):
                self._share(event, inputs.get(event, event.inputs), made)
        # Repeated tensors and sizes take no memory.
        made.update(program.inputs.of_graph)
        self._used: list[list[Tensor]] = []
        # By the first event of a level: what the operations use that the level
        # repeats.
        self._taken: dict[int, list[Tensor]] = {}

        @functools.cache
        def behind(tensor: Tensor) -> list[Tensor]:
            rooted = map(self.rooted, unrepeated([tensor]))
            return [tensor for tensor in rooted if tensor in made]

        begins, level, root = 0, -1, self._root
        for index, event in enumerate(self.events):
            if timeline.levels[event] != level:
                begins, level = index, timeline.levels[event]
            uses = event.used
            if isinstance(event, Operation):
                uses = inputs.get(event, uses)
            used = dict.fromkeys([root.get(t, t) for t in uses])
            self._used.append([tensor for tensor in used if tensor in made])
            for tensor in self._used[-1]:
                self.users.setdefault(tensor, []).append(index)
            repeated = [
                t for t in uses if t.operation and t.operation.is_repeated
            ]
            for tensor in itertools.chain.from_iterable(map(behind, repeated)):
                last = self.users.get(tensor, [-1])[-1]
                if last < begins and timeline.level_of(tensor) < level:
                    self._taken.setdefault(begins, []).append(tensor)
                    self.users.setdefault(tensor, []).append(begins)
        self._results = set(map(self.rooted, program.results))
        self._walk()

    def _share(
        self, event: Operation, given: Sequence[Tensor], made: set[Tensor]
    ) -> None:
        """Note which results of an operation are in the memory of others.

        Args:
            event: the operation.
            given: its inputs.
            made: what is made until then.
        """
        if event.type not in LOOPS:
            if facts_of(event.type).memory == "input":
                # Some operations have further inputs, such as a shape.
                for source, copy in zip(given, event.outputs, strict=False):
                    self._root[copy] = self.rooted(source)
            return
        shared = shared_lists(event)
        for source, copy in zip(given, event.outputs, strict=True):
            root = self.rooted(shared.get(copy, source))
            # A loop changes a list, unless it begins with an empty one, which
            # is repeated where it is used.
            if copy in shared:
                self._root[copy] = root
            elif copy.dtype == tf.variant and root in made:
                self._root[copy] = root
                most = self._bytes.get(root, self._sizes.bytes_of(root))
                self._bytes[root] = max(most, self._sizes.bytes_of(copy))

    def _walk(self) -> None:
        program, timeline = self._timeline.program, self._timeline
        summed = summed_tensors(program) if self._parts > 1 else set()
        inputs = [t for t in program.inputs.of_graph if t in self.users]
        now = sum(map(self.bytes_of, inputs))
        before, level = 0, -1
        for index, event in enumerate(self.events):
            if self._parts > 1 and timeline.levels[event] != level:
                # The sums over earlier micro-batches.
                level = timeline.levels[event]
                before = sum(
                    self._sizes.bytes_of(tensor)
                    for tensor in summed
                    if timeline.level_of(tensor) == level
                )
            ending = self.ending(index)
            own = [t for t in event.made if t not in self._root]
            size = sum([self.bytes_of(t) for t in own])
            taken = self._taken.get(index, ())
            given = [t for t in ending if t not in taken] if taken else ending
            reused = self._reused(event, given)
            ended = [] if reused is None else [reused]
            is_exchange = isinstance(event, Exchange)
            if not is_exchange and event.type in LOOPS:
                # A loop frees elements while it makes others.
                popped = set(map(self.rooted, popped_lists(event)))
                ended += [t for t in ending if t in popped]
            made = max(0, size - sum([self.bytes_of(t) for t in ended]))
            self.made.append(made)
            self.reused.append(reused)
            self.live.append(now + made + (0 if is_exchange else before))
            now += size - sum([self.bytes_of(t) for t in ending])
            for tensor in own:
                if tensor not in self.users and tensor not in self._results:
                    now -= self.bytes_of(tensor)

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
            is_added = self._sharing > 1 and event.kind == "sum"
            return given if is_added and given in ending else None
        if facts_of(event.type).memory != "reused":
            return None
        result, sizes = event.outputs[0], self._sizes
        size = sizes.bytes_of(result)
        for tensor in ending:
            is_computed = tensor.operation is not None
            is_like = sizes.bytes_of(tensor) == size
            if is_like and is_computed and tensor.dtype == result.dtype:
                return tensor
        return None


def rounds_over_ranks(
    timeline: Timeline, sizes: TensorSizes
) -> list[Mapping[str, int]]:
    """Return the bytes that ranks exchange at a time, by kind of exchange.

    Those of two levels, since the second one does not wait for the first. Sums
    of gradients are a kind of their own.
    """
    levels: dict[int, collections.Counter[str]] = {}
    for exchange in timeline.program.exchanges:
        if exchange.crosses_ranks:
            is_gradient = exchange.kind == "sum" and exchange.gradient
            kind = "gradient" if is_gradient else exchange.kind
            level = timeline.levels[exchange]
            of_level = levels.setdefault(level, collections.Counter())
            # Of a slice, less is given than towers have.
            ends = [exchange.result]
            if exchange.part is None:
                ends.append(exchange.given)
            of_level[kind] += max(map(sizes.bytes_of, ends))
    nothing = collections.Counter[str]()
    return [own + levels.get(k + 1, nothing) for k, own in levels.items()]


def held_tensors(timeline: Timeline) -> set[Tensor]:
    """Return the tensors that a tower keeps of all its micro-batches."""
    later = {
        tensor
        for operation in timeline.program.operations
        if not operation.is_repeated
        for tensor in unrepeated(operation.inputs)
        if "micro_batches" in tensor.axes
        and tensor.operation is not None
        and timeline.level_of(tensor) < timeline.levels[operation]
    }
    exchanges = timeline.program.exchanges
    gathered = {e.given for e in exchanges if e.kind == "gather"}
    return later | {
        tensor for tensor in gathered if "micro_batches" in tensor.axes
    }


def summed_tensors(program: Program) -> set[Tensor]:
    """Return the tensors that are summed over towers."""
    kinds = ("sum", "scatter")
    exchanges = [e for e in program.exchanges if "towers" in e.over]
    return {e.given for e in exchanges if e.kind in kinds}
