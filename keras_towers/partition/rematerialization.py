"""Rematerialization: recomputes activations instead of keeping them.

The backward pass uses results of the forward pass. A plan keeps some of them,
and recomputes the others right before their use:

* **cheap operations**: activations, normalizations, dropout, casts. The results
  of products, such as those of matrices and convolutions, are kept;
* **segments**: parts of the forward pass between places where little is alive,
  as in Chen et al. (arXiv 1604.06174). Only what other parts use of a segment
  is kept. Users may mark segments.

Exchanges are not repeated: their results are kept, such as the statistics of a
batch, except for weights in shards, which are gathered again in any case.
Operations with an effect or a state run once. Random draws are functions of a
seed, so they give the same numbers again.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from keras_towers.partition.memory_estimate import MemoryEstimate
from keras_towers.partition.program import (
    Exchange,
    Operation,
    Phase,
    Program,
    Schedule,
    Tensor,
    is_pure,
)
from keras_towers.partition.registry import facts_of
from keras_towers.partition.segments import Division, Segments
from keras_towers.partition.tensor_sizes import TensorSizes

# Segments have these parts of what the backward pass uses.
_SEGMENTS = 2, 3, 4, 6, 8, 12, 16, 24, 32
# The parts of a plan that are tried where less may be enough.
_PARTS = 0.25, 0.5, 0.75
# Results that are so many times smaller than their inputs are kept.
_REDUCES = 16
# How often other parts of a step are tried, such as those of a second model.
_MOST_PEAKS = 3
ALIKE = 1.02
"""Plans whose memory differs by less are chosen by their work."""


def rematerialize(
    program: Program,
    sizes: TensorSizes,
    limit: float = 0,
    most_work: float = math.inf,
    parts: int = 1,
    segments: Segments | None = None,
) -> tuple[Program, Schedule, list[Operation]]:
    """Recompute as little as possible, so that memory stays below a limit.

    Args:
        program: the program; its operations are changed.
        sizes: the sizes of its tensors; gets those of what is added.
        limit: the bytes that a tower may have at a time; if no plan needs so
            few, the one that needs least is chosen. 0: as few as are worth the
            time.
        most_work: the part of the work that may be computed again.
        parts: the number of micro-batches of a tower.
        segments: what is computed again in any case; None: nothing.

    Returns:
        The program, what it computes again and saves, and the operations at
        which it begins to compute a segment again.
    """
    before = MemoryEstimate(program, sizes, parts).peak_bytes()
    best = Schedule(before)
    begins: list[Operation] = []

    def use(plan: _Plan) -> None:
        nonlocal program, best
        plan.copies.use()
        begins.extend(plan.copies.begins)
        program = dataclasses.replace(
            program, operations=plan.copies.operations
        )
        best = Schedule(
            plan.bytes,
            recomputed=best.recomputed + len(plan.copies.originals),
            work=best.work + plan.work,
            saved=before - plan.bytes,
        )

    if segments is not None:
        # For nested segments, the depth that needs the least memory.
        peak = _Peak(program, sizes, parts)
        use(min(peak.plans_of(segments), key=lambda plan: plan.bytes))
    for _ in range(_MOST_PEAKS):
        if best.bytes <= limit:
            break
        peak = _Peak(program, sizes, parts)
        plans = [*peak.plans(limit, most_work - best.work)]
        plans = [p for p in plans if best.work + p.work <= most_work]
        plan = _chosen(plans, limit, best)
        if plan is None:
            break
        use(plan)
    return program, best, begins


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A plan of what to recompute.

    Attributes:
        copies: what is computed again.
        bytes: the bytes that a tower then has at a time.
        work: how much is computed again, as part of all work.
    """

    copies: _Copies
    bytes: int
    work: float


def _chosen(
    plans: Sequence[_Plan], limit: float, now: Schedule
) -> _Plan | None:
    """Return the plan with the least work among those that suffice.

    If none suffices, the plan with the least memory.

    Args:
        plans: the plans.
        limit: the bytes that it should need at most. With a limit, that is best
            which needs least; without one, each percent that a step takes
            longer is to save more than a percent of its memory.
        now: what is needed without a plan.
    """
    plans = [plan for plan in plans if plan.bytes < now.bytes / ALIKE]
    if limit:
        least = min((plan.bytes for plan in plans), default=0) * ALIKE
        fits = [plan for plan in plans if plan.bytes <= max(limit, least)]
        return min(fits, key=lambda plan: plan.work, default=None)
    time = 1 + now.work
    worth = [p for p in plans if p.bytes * (time + p.work) < now.bytes * time]
    return min(worth, key=lambda p: p.bytes * (time + p.work), default=None)


class _Peak:
    """The tensors that are alive when a step needs the most memory.

    Args:
        program: the program.
        sizes: the sizes of its tensors.
        parts: as for ``rematerialize``.

    Attributes:
        sizes: as given.
        events: what happens in the step, in order.
        peak: the position of the event that needs most memory.
        repeated: the operations that are repeated where they are used.
    """

    def __init__(self, program: Program, sizes: TensorSizes, parts: int):
        self._program, self._parts = program, parts
        self.sizes = sizes
        estimate = MemoryEstimate(program, sizes, parts)
        self.events: Sequence[Operation | Exchange] = estimate.events
        self.repeated: list[Operation] = [
            o for o in program.operations if o.is_repeated
        ]
        self._positions = {id(e): k for k, e in enumerate(self.events)}
        live = estimate.live
        self.peak: int = max(range(len(live)), key=live.__getitem__, default=0)
        self._whole_work = sum(map(self._work_of, self.events)) or 1.0
        # By what they gather: the gathers of weights in shards.
        self._gathers: dict[Tensor, list[Exchange]] = {}
        for exchange in program.exchanges:
            if exchange.kind == "gather" and "parts" not in exchange.given.axes:
                same = self._gathers.setdefault(exchange.given, [])
                same.append(exchange)
        self._exchanged = {e.result: e for e in program.exchanges}
        # How many bytes that the backward pass uses are made up to a position,
        # and how many pass it to be used before the peak.
        held, crossing = ([0] * (self.peak + 2) for _ in range(2))
        for tensor, users in estimate.users.items():
            made = self.position_of(tensor)
            if made is None or made > self.peak:
                continue
            size = estimate.bytes_of(tensor)
            if users[-1] > self.peak:
                held[made + 1] += size
            before = users[: bisect.bisect_right(users, self.peak)]
            if before:
                crossing[made + 1] += size
                crossing[before[-1] + 1] -= size
        self._held = [*itertools.accumulate(held)]
        self._crossing = [*itertools.accumulate(crossing)]

    def plans(self, limit: float, most_work: float) -> Iterator[_Plan]:
        """Yield the plans to try.

        Args:
            limit: the bytes to stay below.
            most_work: the part of the work that may be computed again.
        """
        end = self.peak + 1
        yield self._plan(self._divided([end], keeps_products=True))
        for number in _SEGMENTS:
            bounds = self._bounds(self._held[end] / number)
            plan = self._plan(self._divided(bounds))
            yield plan
            if limit < plan.bytes and plan.work <= most_work:
                continue
            # With less, the last ones are kept.
            for part in _PARTS:
                count = round(part * (len(bounds) - 1))
                if 0 < count < len(bounds) - 1:
                    yield self._plan(self._divided([*bounds[:count], end]))

    def plans_of(self, segments: Segments) -> Iterator[_Plan]:
        """Yield the plans with the given segments."""
        yield from map(self._plan, segments.divisions(self.events))

    def _bounds(self, size: float) -> list[int]:
        """Return the ends of segments, each of which holds about so many bytes.

        Each ends where the fewest bytes pass its end.
        """
        end, start = self.peak + 1, 0
        bounds: list[int] = []
        while start < end:
            most = self._held[start] + size
            last = bisect.bisect_right(self._held, most, start + 1, end) - 1
            last = max(last, start + 1)
            # Not so early that there would be many more segments.
            first = bisect.bisect_left(
                self._held, self._held[start] + size / 2, start + 1, last + 1
            )
            first = min(first, last)
            if last >= end - 1:
                bounds.append(end)
                break
            start = min(
                range(last, first - 1, -1), key=self._crossing.__getitem__
            )
            bounds.append(start)
        return bounds

    def _divided(
        self, bounds: Sequence[int], keeps_products: bool = False
    ) -> Division:
        """Return segments with the given ends, before the peak.

        Without ``keeps_products``, the last segment is not recomputed.
        """
        last = len(bounds) - (0 if keeps_products else 1)

        def segment_of(position: int) -> int | None:
            segment = bisect.bisect_right(bounds, position)
            return segment if segment < last else None

        return Division(segment_of, self.peak.__lt__, keeps_products)

    def _plan(self, division: Division) -> _Plan:
        """Return a plan in which segments are computed again."""
        copies = _Copies(self, division)
        with copies.in_use():
            program = dataclasses.replace(
                self._program, operations=copies.operations
            )
            most = MemoryEstimate(program, self.sizes, self._parts).peak_bytes()
        again = sum(map(self._work_of, copies.originals))
        return _Plan(copies, most, again / self._whole_work)

    def _work_of(self, event: Operation | Exchange) -> float:
        if isinstance(event, Exchange):
            return 0.0
        return self.sizes.work_of(event)

    def position_of(self, tensor: Tensor) -> int | None:
        """Return the position of the operation that makes a tensor."""
        return self._positions.get(id(tensor.operation))

    def gathered_near(self, tensor: Tensor, level: int) -> Tensor:
        """Return a tensor, or the same weight where it is gathered again later.

        Args:
            tensor: the tensor.
            level: the level that uses it.
        """
        exchange = self._exchanged.get(tensor)
        if exchange is None:
            return tensor
        found = [
            other
            for other in self._gathers.get(exchange.given, ())
            if other.level < level
            and other.is_own == exchange.is_own
            and other.over == exchange.over
        ]
        last = max(found, key=lambda e: e.level, default=exchange)
        return last.result

    def may_run_again(self, operation: Operation) -> bool:
        """Whether an operation gives the same again, and frees memory."""
        if (
            "towers" not in operation.axes
            or operation.phase is not Phase.TOWERS
            or operation.is_repeated
            or not operation.inputs
            or not is_pure(operation)
        ):
            return False
        made = sum(map(self.sizes.bytes_of, operation.outputs))
        taken = sum(map(self.sizes.bytes_of, operation.inputs))
        return made * _REDUCES > taken


class _Copies:
    """The copies of operations that run again, before those that use them.

    Args:
        peak: the peak that they lower.
        division: what is computed again, and where.

    Attributes:
        operations: all operations of the program, in order.
        originals: those of which there are copies.
        begins: the first copy of each segment.
    """

    def __init__(self, peak: _Peak, division: Division):
        self._peak, self._division = peak, division
        self.originals: list[Operation] = []
        self.begins: list[Operation] = []
        self._begun: set[int | None] = set()
        self._copied: dict[Tensor, Tensor] = {}
        # The inputs of those that use copies.
        self._inputs: list[tuple[Operation, Sequence[Tensor]]] = []
        self.operations: list[Operation] = [*peak.repeated]
        # The last operations of the backward pass so far.
        entered: Sequence[Operation] = ()
        for position, event in enumerate(peak.events):
            if not isinstance(event, Operation):
                continue
            if event.phase is Phase.TOWERS and division.is_late(position):
                own = [
                    tensor.operation
                    for tensor in event.inputs
                    if tensor.operation and self._is_late(tensor)
                ]
                entered = own or entered
                self._use_copies(event, entered)
            self.operations.append(event)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Make operations use the copies in this block."""
        before = [(o, o.inputs) for o, _ in self._inputs]
        self.use()
        try:
            yield
        finally:
            for operation, inputs in before:
                operation.inputs = inputs

    def use(self) -> None:
        """Make operations use the copies."""
        for operation, inputs in self._inputs:
            operation.inputs = inputs

    def _use_copies(
        self, user: Operation, entered: Sequence[Operation]
    ) -> None:
        """Add the copies that an operation uses."""
        needed: dict[int, Operation] = {}
        for tensor in user.inputs:
            segment = self._segment_of(tensor)
            if segment is not None:
                needed |= self._needed_for(tensor, segment)
        first = len(self.operations)
        for position in sorted(needed):
            self._copy(needed[position], user.level, entered)
        segments = {self._division.segment_of(n) for n in needed}
        if not segments <= self._begun:
            self._begun |= segments
            self.begins.append(self.operations[first])
        inputs = [self._copied.get(tensor, tensor) for tensor in user.inputs]
        if inputs != [*user.inputs]:
            self._inputs.append((user, inputs))

    def _is_late(self, tensor: Tensor) -> bool:
        position = self._peak.position_of(tensor)
        return position is not None and self._division.is_late(position)

    def _segment_of(self, tensor: Tensor) -> int | None:
        position = self._peak.position_of(tensor)
        return None if position is None else self._division.segment_of(position)

    def _needed_for(self, tensor: Tensor, segment: int) -> dict[int, Operation]:
        """Return the operations of a segment that recompute a tensor."""
        found: dict[int, Operation] = {}
        waiting = [tensor]
        while waiting:
            needed = waiting.pop()
            operation = needed.operation
            position = self._peak.position_of(needed)
            if (
                operation is None
                or position is None
                or position in found
                or needed in self._copied
                or self._division.segment_of(position) != segment
                or not self._peak.may_run_again(operation)
                or (self._division.keeps_products and _is_product(operation))
            ):
                continue
            found[position] = operation
            waiting += operation.inputs
        return found

    def _copy(
        self, original: Operation, level: int, entered: Sequence[Operation]
    ) -> None:
        """Add a copy of an operation to a level."""
        inputs = [self._taken(tensor, level) for tensor in original.inputs]
        outputs: list[Tensor] = []
        is_first = not any(t in self._copied for t in original.inputs)
        copy = dataclasses.replace(
            original,
            inputs=inputs,
            outputs=outputs,
            level=level,
            suffix=f"{original.suffix}_again",
            after=entered if is_first else (),
        )
        for tensor in original.outputs:
            again = dataclasses.replace(tensor, operation=copy, level=level)
            outputs.append(again)
            self._copied[tensor] = again
        self._peak.sizes.add_like(outputs, original.outputs)
        self.originals.append(original)
        self.operations.append(copy)

    def _taken(self, tensor: Tensor, level: int) -> Tensor:
        """Return the tensor that a copy takes in place of another."""
        if tensor in self._copied:
            return self._copied[tensor]
        return self._peak.gathered_near(tensor, level)


def _is_product(operation: Operation) -> bool:
    """Whether an operation multiplies matrices, or convolves."""
    return facts_of(operation.type).work is not None
