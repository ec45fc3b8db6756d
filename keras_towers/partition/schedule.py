"""When a step computes what: the order of its operations.

TensorFlow's executor runs what became ready last first. In a backward pass the
gradients of weights, which nothing waits for, then run at its very end, and
each keeps the gradient and the input of its layer. So an operation that takes
memory waits for those that, in the order of the program, have freed memory
before it. Whatever runs at a time then needs no more memory than the order
does, and what may be in flight beside it::

    gradient of layer 2's input     takes memory
    gradient of layer 2's weights   frees the gradient of layer 3's input
    gradient of layer 1's input     takes memory: waits for the line above

XLA orders what it compiles itself.

In the order of the program, what takes as much memory as it frees comes right
before what uses it, on any level: the gradient that is computed once for all
towers, before the update of its variable.

Gradients are exchanged as they arrive: the backward pass is divided into levels
at whose ends those of some bytes are exchanged, while the next level is
computed. A level waits for the end of the one two before it, and so for the
updates with these gradients.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import tensorflow as tf

from keras_towers.partition.axes import COLUMNS
from keras_towers.partition.lifetimes import (
    Lifetimes,
    events_of,
    rounds_over_ranks,
)
from keras_towers.partition.program import (
    Exchange,
    Operation,
    Phase,
    Program,
    Tensor,
    depends_on_batch,
    is_over,
    is_pure,
    level_after,
)
from keras_towers.partition.rematerialization import ALIKE, rematerialize
from keras_towers.partition.segments import Segments
from keras_towers.partition.tensor_sizes import TensorSizes

# The part of what a tower has at most, with its variables, that may be in
# flight besides, and the part of what a step needs of the smallest tensors that
# wait.
_IN_FLIGHT = 16
_SMALL = 512
# Tensors of fewer bytes never wait. So a counter of steps does not wait for the
# batch, as on one device: there may be no other batch.
_SMALL_BYTES = 1024
# The bytes of gradients that are exchanged together, and how many exchanges of
# that kind a step has at most.
_EXCHANGED = 2**24
_MOST_EXCHANGES = 24


@dataclasses.dataclass(frozen=True)
class RematLimits:
    """The limits of what may be computed again.

    Attributes:
        limit: the bytes of a tower for which as little as possible is computed
            again; with 0 it is as much as is worth its time.
        most_work: the part of the step's work that may be computed again.
    """

    limit: float = math.inf
    most_work: float = math.inf


KEEP_ALL = RematLimits()


def schedule(
    program: Program,
    towers: int,
    rows: int,
    parts: int = 1,
    remat: RematLimits = KEEP_ALL,
    xla: bool = False,
    segments: Segments | None = None,
    sharing: int = 1,
    over_ranks: bool = False,
) -> Program:
    """Decide when a program computes what.

    Args:
        program: the program, whose operations are changed.
        towers: the number of towers, or of their micro-batches, in all
            processes.
        rows: the number of examples of each of them.
        parts: the number of micro-batches of a tower.
        remat: what may be computed again.
        xla: whether XLA compiles it.
        segments: what is computed again in any case; None: nothing.
        sharing: the number of towers that share memory.
        over_ranks: whether there are several processes.
    """
    sizes = TensorSizes(program, towers, rows)
    program = compute_late(program, sizes)
    # Gradients of several micro-batches are added up first.
    begins = exchange_early(program, sizes) if parts == 1 else []
    if begins:
        program = divide_levels(program, begins)
    program, found, again = rematerialize(
        program, sizes, remat.limit, remat.most_work, parts, segments
    )
    if not xla:
        keep_order(program, sizes, parts)
    elif again and parts == 1:
        # XLA merges equal operations of a function.
        program = divide_levels(program, again)
    lifetimes = Lifetimes(program, sizes, parts, sharing)
    shared, rounds = lifetimes.most_bytes(), list[Mapping[str, int]]()
    if over_ranks:
        shared = lifetimes.most_bytes_over_ranks()
        rounds = rounds_over_ranks(program, sizes)
    found = dataclasses.replace(
        found, shared=shared, rounds=rounds, is_paced=bool(begins)
    )
    return dataclasses.replace(program, schedule=found)


def compute_late(program: Program, sizes: TensorSizes) -> Program:
    """Let operations wait for the first one that uses them, on any level.

    Only where that keeps no more than is not there yet. So the first operations
    of the backward pass, which depend on the forward pass only, wait for the
    others, and those of an optimizer follow on the computation of its gradient,
    where in the order of the trace those of all gradients come first.

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
    repeated: list[Operation] = []
    for index, operation in reversed([*enumerate(program.operations)]):
        users = [first[t] for t in operation.outputs if t in first]
        phase = operation.phase
        place = _Place(operation.level, phase, index, index)
        if operation.is_repeated:
            repeated.insert(0, operation)
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
            is_ready = not is_over(tensor, phase)
            at_end = _Place.at_end_of(place.level - 1)
            use([tensor], place if is_ready else at_end)
        places.append((place, operation))
    places.sort(key=lambda pair: pair[0])
    operations = [*repeated, *(operation for _, operation in places)]
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
    """Return what the operations that are added to a graph together share."""
    return operation.level, operation.phase, operation.axes & COLUMNS


def exchange_early(program: Program, sizes: TensorSizes) -> list[Operation]:
    """Return where levels begin at whose ends gradients are exchanged.

    Args:
        program: the program.
        sizes: the sizes of its tensors.

    Returns:
        Operations of the backward pass; none if gradients are few.
    """
    gradients = {e.given for e in program.exchanges if e.gradient}
    total = sum(map(sizes.bytes_of, gradients))
    together = max(_EXCHANGED, total // _MOST_EXCHANGES)
    if total < 2 * together:
        return []
    begins: list[Operation] = []
    filled = 0
    for event in events_of(program):
        if isinstance(event, Exchange):
            continue
        if _is_check(event):
            # A step whose assertion fails updates nothing.
            begins, filled = [], 0
        if not _is_of_pass(event):
            continue
        if filled >= together:
            begins.append(event)
            filled = 0
        given = gradients.intersection(event.outputs)
        filled += sum(map(sizes.bytes_of, given))
    return begins


def divide_levels(program: Program, begins: Iterable[Operation]) -> Program:
    """Let levels begin at operations of the forward or the backward pass.

    Args:
        program: the program; the levels of its operations are changed.
        begins: operations, at which the operations of a tower that follow begin
            another level.
    """
    first = {id(operation) for operation in begins}
    exchanges: list[Exchange] = []
    levels = _Levels(program)
    least = reached = 0
    for event in events_of(program):
        if isinstance(event, Exchange):
            # What towers compute with is gathered late; all else is free.
            later = (
                reached if event.least and "towers" in event.result.axes else 0
            )
            exchanges.append(dataclasses.replace(event, least=later))
            event.result.level = exchanges[-1].level + 1
            continue
        if id(event) in first:
            least = reached + 1
        is_of_pass = _is_of_pass(event)
        levels.place(event, least if is_of_pass else 0)
        if is_of_pass:
            reached = max(reached, event.level)
    return dataclasses.replace(program, exchanges=exchanges)


def _is_of_pass(operation: Operation) -> bool:
    """Whether towers compute rows, or what follows from them."""
    is_of_towers = operation.phase is Phase.TOWERS
    return is_of_towers and depends_on_batch(operation.outputs)


def _is_check(operation: Operation) -> bool:
    """Whether an operation has an effect, but writes no variable."""
    uses = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    return operation.has_effect and not uses


class _Levels:
    """The levels of operations, which use resources in the order given."""

    def __init__(self, program: Program):
        inputs = program.inputs
        # A variable, and its copies on towers, are one resource.
        self._same: dict[Tensor, Tensor] = {
            copy: inputs.of_graph[index]
            for index, copy in inputs.copies.items()
        }
        self._used: dict[Tensor | None, tuple[int, Phase]] = {}

    def place(self, operation: Operation, least: int) -> None:
        """Place an operation on the earliest level that is possible."""
        phase = operation.phase
        used: list[Tensor | None] = [
            self._same.get(t, t)
            for t in operation.inputs
            if t.dtype == tf.resource
        ]
        if operation.has_effect and not used:
            used = [None]
        for key in used:
            level, last = self._used.get(key, (0, Phase.ONCE))
            least = max(least, level if phase >= last else level + 1)
        level = level_after(operation.inputs, phase, least)
        operation.level = level
        for tensor in operation.outputs:
            tensor.level = level
        self._used |= dict.fromkeys(used, (level, phase))


def keep_order(program: Program, sizes: TensorSizes, parts: int = 1) -> None:
    """Let operations wait for those that free memory before them.

    Args:
        program: the program; its operations get others that they run after.
        sizes: the sizes of its tensors.
        parts: the number of micro-batches of a tower.
    """
    lifetimes = Lifetimes(program, sizes, parts)
    most = lifetimes.most_bytes()
    in_flight = (most + _bytes_of_variables(program, sizes)) // _IN_FLIGHT
    queues: dict[Hashable, _Queue] = collections.defaultdict(
        lambda: _Queue(in_flight, max(most // _SMALL, _SMALL_BYTES))
    )
    for index, event in enumerate(lifetimes.events):
        if not isinstance(event, Operation):
            continue
        queue = queues[_group_of(event)]
        reused = lifetimes.reused[index]
        if lifetimes.made[index] or reused is not None:
            queue.take(event, lifetimes.made[index])
        if reused is not None and lifetimes.bytes_of(reused) > queue.small:
            # Its memory is taken over only if nobody else uses it any more.
            queue.wait(event, _users(lifetimes, reused))
        for tensor in lifetimes.ending(index):
            if tensor is not reused:
                users = _users(lifetimes, tensor)
                queue.free(lifetimes.bytes_of(tensor), users)


def _bytes_of_variables(program: Program, sizes: TensorSizes) -> int:
    """Return what a tower has of the variables that a program reads."""
    read = {
        operation.inputs[0]: operation.outputs[0]
        for operation in program.operations
        if operation.type == "ReadVariableOp"
    }
    return sum(map(sizes.bytes_of, read.values()))


def _users(lifetimes: Lifetimes, tensor: Tensor) -> list[Operation]:
    events = [lifetimes.events[index] for index in lifetimes.users[tensor]]
    return [event for event in events if isinstance(event, Operation)]


class _Queue:
    """The operations of a level that free memory, and those that wait for it.

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
        # The last operation that has waited, after which all others are.
        self._last: Operation | None = None

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
        before = [] if self._last is None else [self._last]
        self.wait(operation, [*before, *users])
        if users:
            self._last = operation

    def wait(self, operation: Operation, others: list[Operation]) -> None:
        """Let an operation run after others, none of which follows it."""
        known = {id(tensor.operation) for tensor in operation.inputs}
        known |= {id(other) for other in operation.after} | {id(operation)}
        found = [o for o in others if id(o) not in known]
        operation.after = [*operation.after, *dict.fromkeys(found)]
