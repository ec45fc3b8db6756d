"""The schedule: in which order a program's operations run.

TensorFlow's executor first runs what became ready last. In a backward pass, the
gradients of weights, which nothing waits for, would run at the very end, and
each would keep the gradient and the input of its layer until then. So an
operation that takes memory waits for the operations before it, in the order of
the program, that free memory. A step then needs no more memory than this order
does, plus what may be in flight::

    gradient of layer 2's input     takes memory
    gradient of layer 2's weights   frees the gradient of layer 3's input
    gradient of layer 1's input     takes memory: waits for the line above

XLA orders the operations that it compiles itself.

An operation that takes as much memory as it frees comes right before its first
use, on any level. An example is a gradient that is computed once for all
towers, before the update of its variable.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from keras_towers.partition.ir.axes import COLUMNS
from keras_towers.partition.ir.layouts import Sharded, Unit
from keras_towers.partition.ir.program import (
    Event,
    Operation,
    Phase,
    Program,
    Tensor,
    computed_after,
    is_pure,
    is_repeated,
    unrepeated,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.gathers import place_earliest
from keras_towers.partition.timeline.gradient_buckets import (
    bucket_gradients,
    divide_levels,
)
from keras_towers.partition.timeline.kept_results import KEEP_ALL, RematLimits
from keras_towers.partition.timeline.memory_estimate import (
    ALIKE,
    MemoryEstimate,
    rounds_over_ranks,
)
from keras_towers.partition.timeline.rematerialization import rematerialize
from keras_towers.partition.timeline.segments import Segments
from keras_towers.partition.timeline.sliced_weights.weight_slices import (
    in_slices,
)
from keras_towers.partition.timeline.timeline import Timeline

# The parts of what a tower has at most, with its variables, that may be in
# flight besides: where memory is short, and where it is not. And the part of
# what a step needs of the smallest tensors that wait.
_LEAST_IN_FLIGHT = 16
_MOST_IN_FLIGHT = 2
_SMALL = 512
# The most operations that run at a time after they waited for memory. One alone
# would leave cores idle, as in an update, which has no others.
_AT_A_TIME = 4
# Tensors of fewer bytes never wait. So a counter of steps does not wait for the
# batch, as on one device: there may be no other batch.
_SMALL_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a batch is split over towers.

    Attributes:
        towers: the number of towers, or of their micro-batches, in all
            processes.
        rows: the number of examples of each of them.
        parts: the number of micro-batches of a tower.
        sharing: the number of towers that share memory.
        over_ranks: whether there are several processes.
    """

    towers: int
    rows: int
    parts: int = 1
    sharing: int = 1
    over_ranks: bool = False


def schedule(
    program: Program,
    split: BatchSplit,
    remat: RematLimits = KEEP_ALL,
    segments: Segments | None = None,
    gather_bytes: int = 2**29,
    xla: bool = False,
) -> Timeline:
    """Decide when a program computes and exchanges what.

    Args:
        program: the program.
        split: how the batch is split.
        remat: what may be computed again.
        segments: what is computed again in any case; None: nothing.
        gather_bytes: the bytes of gathered variables at a time.
        xla: whether XLA compiles it.
    """
    sizes, parts = TensorSizes(program, split.towers, split.rows), split.parts
    program = in_slices(program, sizes, gather_bytes, xla)
    timeline = place_earliest(program, sizes, gather_bytes)
    timeline = compute_late(timeline, sizes)
    # Gradients of several micro-batches are added up first.
    begins: Sequence[Event] = []
    if parts == 1:
        begins = bucket_gradients(timeline, sizes)
    if begins:
        timeline = divide_levels(timeline, begins)
    timeline, segment_begins = rematerialize(
        timeline, sizes, parts, remat, segments
    )
    if not xla:
        timeline = keep_order(timeline, sizes, parts, remat.limit)
    elif segment_begins and parts == 1:
        # XLA merges equal operations of a function.
        timeline = divide_levels(timeline, segment_begins)
    estimate = MemoryEstimate(timeline, sizes, parts, split.sharing)
    shared, rounds = estimate.peak_bytes(), list[Mapping[str, Sequence[int]]]()
    if split.over_ranks:
        shared = estimate.peak_bytes_over_ranks()
        rounds = rounds_over_ranks(timeline, sizes)
    work = sum(map(sizes.work_of, timeline.program.operations))
    plan = dataclasses.replace(
        timeline.plan,
        parts=parts,
        shared=shared,
        rounds=rounds,
        multiplications=work,
    )
    return dataclasses.replace(timeline, plan=plan, is_paced=bool(begins))


def compute_late(timeline: Timeline, sizes: TensorSizes) -> Timeline:
    """Move operations towards the first one that uses them, on any level.

    Only where this keeps no more memory: the inputs that it keeps alive are no
    larger than its results. So the first operations of the backward pass, which
    depend on the forward pass only, wait for the others. And the operations of
    an optimizer follow the computation of their gradient; in the trace they
    follow all gradients.

    Args:
        timeline: the timeline.
        sizes: the sizes of its tensors.
    """
    first: dict[Tensor, _Place] = {}
    last: dict[Tensor, _Place] = {}
    program, levels = timeline.program, {**timeline.levels}

    def use(tensors: Iterable[Tensor], place: _Place) -> None:
        for tensor in tensors:
            first[tensor] = min(first.get(tensor, place), place)
            last[tensor] = max(last.get(tensor, place), place)

    ends = [exchange.used for exchange in program.exchanges]
    for used in [*ends, *([tensor] for tensor in program.results)]:
        level = max(map(timeline.level_of, used))
        use(unrepeated(used), _Place.at_end_of(level))
    # What comes after operations although it uses no result of theirs.
    follows: dict[Event, list[_Place]] = collections.defaultdict(list)
    places: list[tuple[_Place, Operation]] = []
    for index, operation in reversed([*enumerate(program.operations)]):
        if operation.is_repeated:
            continue
        users = [first[t] for t in operation.outputs if t in first]
        phase = operation.phase
        place = _Place(levels[operation], phase, index, index)
        if users and is_pure(operation):
            later = min([*users, *follows[operation]])
            before = later.before if later.phase == phase else index
            later = _Place(later.level, phase, before, index)
            kept = [
                tensor
                for tensor in dict.fromkeys(operation.inputs)
                if not (tensor.operation and tensor.operation.is_repeated)
                and (tensor not in last or last[tensor] < later)
            ]
            made = sum(map(sizes.bytes_of, operation.outputs))
            if made * ALIKE >= sum(map(sizes.bytes_of, kept)):
                place = max(place, later)
        levels[operation] = place.level
        at_end = _Place.at_end_of(place.level - 1)
        for tensor in unrepeated(operation.inputs):
            is_ready = not computed_after(tensor, phase)
            use([tensor], place if is_ready else at_end)
        for other in program.before.get(operation, ()):
            if isinstance(other, Operation):
                is_ready = other.phase <= phase
                follows[other].append(place if is_ready else at_end)
        places.append((place, operation))
    places.sort(key=lambda pair: pair[0])
    events: list[Event] = [*filter(is_repeated, program.events)]
    events += [operation for _, operation in places]
    return timeline.reordered([*events, *program.exchanges], levels)


class _Place(NamedTuple):
    """A place among the operations of a program.

    Attributes:
        level: the level.
        phase: the phase of the level.
        before: the index of the operation that waits for no other, right before
            which it is, or which it is.
        own: the index of the operation.
    """

    level: int
    phase: int
    before: float
    own: float

    @classmethod
    def at_end_of(cls, level: int) -> _Place:
        """Return the place after all operations of a level."""
        return cls(level, len(Phase), math.inf, math.inf)


def keep_order(
    timeline: Timeline, sizes: TensorSizes, parts: int, limit: float = 0.0
) -> Timeline:
    """Let operations wait for those that free memory before them.

    A wait takes cores from the other operations of a tower. So operations wait
    only if memory is short: below the limit there is room for more in flight.

    Args:
        timeline: the timeline.
        sizes: the sizes of its tensors.
        parts: the number of micro-batches of a tower.
        limit: the bytes that a tower should have at most; infinite: unknown.
            It is then short only if something is computed again, or in shards.
    """
    estimate = MemoryEstimate(timeline, sizes, parts)
    most, waits = estimate.peak_bytes(), {**timeline.waits}
    whole = most + _bytes_of_variables(timeline, sizes)
    saves = timeline.plan.recomputed > 0 or _has_shards(timeline.program)
    is_short = math.isinf(limit) and saves
    spare = 0 if is_short else min(limit - most, whole // _MOST_IN_FLIGHT)
    in_flight = int(max(spare, whole // _LEAST_IN_FLIGHT))
    queues: dict[Hashable, _Queue] = collections.defaultdict(
        lambda: _Queue(in_flight, max(most // _SMALL, _SMALL_BYTES), waits)
    )
    for index, event in enumerate(estimate.events):
        if not isinstance(event, Operation):
            continue
        # Those of a key are added to a graph together.
        level, columns = timeline.levels[event], event.axes & COLUMNS
        queue = queues[level, event.phase, columns]
        reused = estimate.reused[index]
        if estimate.made[index] or reused is not None:
            queue.take(event, estimate.made[index])
        if reused is not None and estimate.bytes_of(reused) > queue.small:
            # Its memory is taken over only if nobody else uses it any more.
            queue.wait(event, _users(estimate, reused))
        for tensor in estimate.ending(index):
            if tensor is not reused:
                users = _users(estimate, tensor)
                queue.free(estimate.bytes_of(tensor), users)
    return dataclasses.replace(timeline, waits=waits)


def _has_shards(program: Program) -> bool:
    """Whether towers have variables in shards."""
    layouts = [value.layout for value in program.values.values()]
    units = [layout.unit for layout in layouts if isinstance(layout, Sharded)]
    return any(isinstance(u, Unit) and u.of_variables for u in units)


def _bytes_of_variables(timeline: Timeline, sizes: TensorSizes) -> int:
    """Return the bytes of the variables that a tower reads."""
    read = {
        operation.inputs[0]: operation.outputs[0]
        for operation in timeline.program.operations
        if operation.type == "ReadVariableOp"
    }
    return sum(map(sizes.bytes_of, read.values()))


def _users(estimate: MemoryEstimate, tensor: Tensor) -> list[Operation]:
    events = [estimate.events[index] for index in estimate.users[tensor]]
    return [event for event in events if isinstance(event, Operation)]


class _Queue:
    """The operations of a level that free memory, and those that wait for them.

    Args:
        in_flight: the bytes of freed memory that nothing waits for.
        small: the bytes of tensors that take memory without waiting.
        waits: gets what operations wait for.
    """

    def __init__(
        self,
        in_flight: int,
        small: int,
        waits: dict[Operation, Sequence[Operation]],
    ):
        self.small, self._waits = small, waits
        self._in_flight = in_flight
        self._freed: collections.deque[tuple[int, list[Operation]]]
        self._freed = collections.deque()
        self._bytes = 0
        # The last operations that have waited, each with those for which the
        # ones before it did not wait.
        self._waited: collections.deque[tuple[Operation, list[Operation]]]
        self._waited = collections.deque()
        # The last one before them, after which all that it waited for are.
        self._last: list[Operation] = []

    def free(self, size: int, users: list[Operation]) -> None:
        """Note that memory is free once these operations have run."""
        if size > self.small:
            self._freed.append((size, users))
            self._bytes += size

    def take(self, operation: Operation, size: int) -> None:
        """Let an operation that takes memory wait."""
        if size <= self.small:
            return
        users = []
        while self._bytes > self._in_flight:
            freed, last = self._freed.popleft()
            self._bytes -= freed
            users += last
        if users:
            self._waited.append((operation, users))
        if len(self._waited) > _AT_A_TIME:
            self._last = [self._waited.popleft()[0]]
        others = [user for _, users in self._waited for user in users]
        self.wait(operation, self._last + others)

    def wait(self, operation: Operation, others: list[Operation]) -> None:
        """Make an operation run after others, none of which depends on it."""
        before = self._waits.get(operation, ())
        known = {tensor.operation for tensor in operation.inputs}
        known |= {*before, operation}
        found = dict.fromkeys(o for o in others if o not in known)
        if found:
            self._waits[operation] = [*before, *found]
