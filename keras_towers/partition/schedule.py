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
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import tensorflow as tf

from keras_towers.partition.axes import COLUMNS
from keras_towers.partition.called_functions import functions_of
from keras_towers.partition.gradient_buckets import (
    bucket_gradients,
    divide_levels,
)
from keras_towers.partition.kept_results import KEEP_ALL, RematLimits
from keras_towers.partition.memory_estimate import (
    ALIKE,
    MemoryEstimate,
    rounds_over_ranks,
)
from keras_towers.partition.program import (
    Operation,
    Phase,
    Program,
    Tensor,
    computed_after,
    is_pure,
)
from keras_towers.partition.rematerialization import rematerialize
from keras_towers.partition.segments import Segments
from keras_towers.partition.tensor_sizes import TensorSizes

# The part of what a tower has at most, with its variables, that may be in
# flight besides, and the part of what a step needs of the smallest tensors that
# wait.
_IN_FLIGHT = 16
_SMALL = 512
# The most rounds of a loop that run at a time.
_ROUNDS = 4
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
    xla: bool = False,
) -> Program:
    """Order the operations of a program, and recompute some.

    Args:
        program: the program, whose operations are changed.
        split: how the batch is split.
        remat: what may be computed again.
        segments: what is computed again in any case; None: nothing.
        xla: whether XLA compiles it.
    """
    sizes, parts = TensorSizes(program, split.towers, split.rows), split.parts
    program = compute_late(program, sizes)
    # Gradients of several micro-batches are added up first.
    begins = bucket_gradients(program, sizes) if parts == 1 else []
    if begins:
        program = divide_levels(program, begins)
    program, summary, segment_begins = rematerialize(
        program, sizes, parts, remat, segments
    )
    if not xla:
        keep_order(program, sizes, parts)
        limit_rounds(program.operations)
    elif segment_begins and parts == 1:
        # XLA merges equal operations of a function.
        program = divide_levels(program, segment_begins)
    estimate = MemoryEstimate(program, sizes, parts, split.sharing)
    shared, rounds = estimate.peak_bytes(), list[Mapping[str, int]]()
    if split.over_ranks:
        shared = estimate.peak_bytes_over_ranks()
        rounds = rounds_over_ranks(program, sizes)
    summary = dataclasses.replace(
        summary, shared=shared, rounds=rounds, is_paced=bool(begins)
    )
    return dataclasses.replace(program, schedule=summary)


def compute_late(program: Program, sizes: TensorSizes) -> Program:
    """Move operations towards the first one that uses them, on any level.

    Only where this keeps no more memory: the inputs that it keeps alive are no
    larger than its results. So the first operations of the backward pass, which
    depend on the forward pass only, wait for the others. And the operations of
    an optimizer follow the computation of their gradient; in the trace they
    follow all gradients.

    Args:
        program: the program; the levels of its operations are changed.
        sizes: the sizes of its tensors.
    """
    first: dict[Tensor, _Place] = {}
    last: dict[Tensor, _Place] = {}

    def use(tensors: Iterable[Tensor], place: _Place) -> None:
        for tensor in tensors:
            first[tensor] = min(first.get(tensor, place), place)
            last[tensor] = max(last.get(tensor, place), place)

    for exchange in program.exchanges:
        use(exchange.used, _Place.at_end_of(exchange.given.level))
    for tensor in program.results:
        use([tensor], _Place.at_end_of(tensor.level))
    places: list[tuple[_Place, Operation]] = []
    for index, operation in reversed([*enumerate(program.operations)]):
        users = [first[t] for t in operation.outputs if t in first]
        phase = operation.phase
        place = _Place(operation.level, phase, index, index)
        if operation.is_repeated:
            for used in (first, last):
                for tensor in operation.outputs:
                    if tensor in used:
                        use(operation.inputs, used[tensor])
            continue
        if users and is_pure(operation):
            later = min(users)
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
        operation.level = place.level
        for tensor in operation.outputs:
            tensor.level = place.level
        for tensor in dict.fromkeys(operation.inputs):
            is_ready = not computed_after(tensor, phase)
            at_end = _Place.at_end_of(place.level - 1)
            use([tensor], place if is_ready else at_end)
        places.append((place, operation))
    places.sort(key=lambda pair: pair[0])
    operations = [o for o in program.operations if o.is_repeated]
    operations += [operation for _, operation in places]
    return dataclasses.replace(program, operations=operations)


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


def _group_of(operation: Operation) -> Hashable:
    """Return a key of the operations that are added to a graph together."""
    return operation.level, operation.phase, operation.axes & COLUMNS


def keep_order(program: Program, sizes: TensorSizes, parts: int) -> None:
    """Make operations wait for those that free memory before them.

    Args:
        program: the program; its operations get others that they run after.
        sizes: the sizes of its tensors.
        parts: the number of micro-batches of a tower.
    """
    estimate = MemoryEstimate(program, sizes, parts)
    most = estimate.peak_bytes()
    in_flight = (most + _bytes_of_variables(program, sizes)) // _IN_FLIGHT
    queues: dict[Hashable, _Queue] = collections.defaultdict(
        lambda: _Queue(in_flight, max(most // _SMALL, _SMALL_BYTES))
    )
    for index, event in enumerate(estimate.events):
        if not isinstance(event, Operation):
            continue
        queue = queues[_group_of(event)]
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


def limit_rounds(operations: Iterable[Operation]) -> None:
    """Let only a few rounds of a loop run at a time.

    In the backward pass, rounds run ahead of the sums over rounds. Each then
    keeps its part of the gradient of every weight.

    Args:
        operations: operations, whose attributes are changed.
    """
    name = "parallel_iterations"
    for operation in operations:
        if name in operation.attributes:
            most = min(operation.attributes[name].i, _ROUNDS)
            value = tf.compat.v1.AttrValue(i=most)
            operation.attributes = {**operation.attributes, name: value}
        for function in functions_of(operation):
            limit_rounds(function.operations)


def _bytes_of_variables(program: Program, sizes: TensorSizes) -> int:
    """Return the bytes of the variables that a tower reads."""
    read = {
        operation.inputs[0]: operation.outputs[0]
        for operation in program.operations
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
    """

    def __init__(self, in_flight: int, small: int):
        self.small = small
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
        known = {id(tensor.operation) for tensor in operation.inputs}
        known |= {id(other) for other in operation.after} | {id(operation)}
        found = [o for o in others if id(o) not in known]
        operation.after = [*operation.after, *dict.fromkeys(found)]
