"""Rematerialization: recomputes activations instead of keeping them.

The backward pass uses results of the forward pass. A plan keeps some of them,
and recomputes the others right before their use:

* **segments** are parts of the forward pass between places where little is
  alive, as in Chen et al. (arXiv 1604.06174). Each is recomputed on its own,
  from what is kept. Users may mark segments;
* **a price** of memory decides what a segment keeps: results that take more
  work than their bytes are worth, such as products of matrices. At a low price,
  only cheap operations run again: activations, normalizations, dropout, casts.
  At a high one, nearly all do.

Exchanges are not repeated: their results are kept, such as the statistics of a
batch, except for weights in shards, which are gathered again in any case.
Operations with an effect or a state run once. Random draws are functions of a
seed, so they give the same numbers again.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Operation,
    Phase,
    Tensor,
    depends_on_batch,
    is_pure,
    is_repeated,
    with_inputs,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.kept_results import (
    ALWAYS,
    RematLimits,
    worth_keeping,
)
from keras_towers.partition.timeline.memory_estimate import (
    ALIKE,
    MemoryEstimate,
)
from keras_towers.partition.timeline.segments import (
    Division,
    Segments,
    ends_of_segments,
)
from keras_towers.partition.timeline.timeline import StepPlan, Timeline

# The part before the peak is one segment, or so many.
_SEGMENTS = 1, 3, 6, 12, 24
# The percents of work that saving a percent of memory may cost.
_PRICES = [2.0**power for power in range(-6, 7)]
_FAIR_PRICE = 1.0
# How often other parts of a step are tried, such as those of a second model.
_MOST_PEAKS = 3


def rematerialize(
    timeline: Timeline,
    sizes: TensorSizes,
    parts: int,
    limits: RematLimits,
    segments: Segments | None,
) -> tuple[Timeline, list[Event]]:
    """Recompute as little as possible, so that memory stays below a limit.

    Args:
        timeline: the timeline.
        sizes: the sizes of its tensors; gets those of what is added.
        parts: the number of micro-batches of a tower.
        limits: what may be computed again.
        segments: what is computed again in any case; None: nothing.

    Returns:
        The timeline, and the operations at which it begins to compute a segment
        again.
    """
    before = MemoryEstimate(timeline, sizes, parts).peak_bytes()
    best = StepPlan(before)
    begins: list[Event] = []

    def use(plan: _Plan) -> None:
        nonlocal timeline, best, begins
        timeline, new = plan.used()
        begins = [new[event] for event in (*begins, *plan.begins)]
        best = StepPlan(
            plan.bytes,
            recomputed=best.recomputed + len(plan.again),
            work=best.work + plan.work,
            saved=before - plan.bytes,
        )

    if segments is not None:
        # For nested segments, the depth that needs the least memory.
        peak = _Peak(timeline, sizes, parts, before)
        use(min(peak.plans_of(segments), key=lambda plan: plan.bytes))
    for _ in range(_MOST_PEAKS):
        if best.bytes <= limits.limit:
            break
        peak = _Peak(timeline, sizes, parts, before)
        left = limits.most_work - best.work
        plans = [*peak.plans(limits.limit, left)]
        plans = [plan for plan in plans if plan.work <= left]
        plan = _chosen(plans, limits.limit, best)
        if plan is None:
            break
        use(plan)
    return dataclasses.replace(timeline, plan=best), begins


def _chosen(
    plans: Sequence[_Plan], limit: float, now: StepPlan
) -> _Plan | None:
    """Return the plan with the least work among those that suffice.

    If none suffices, the plan with the least memory.

    Args:
        plans: the plans.
        limit: the bytes that it should need at most. With a limit, that is best
            which needs least; without one, each percent of the step's work is
            to save more than a percent of its memory.
        now: what is needed without a plan.
    """
    plans = [plan for plan in plans if plan.bytes < now.bytes / ALIKE]
    if limit:
        least = min((plan.bytes for plan in plans), default=0) * ALIKE
        fits = [plan for plan in plans if plan.bytes <= max(limit, least)]
        return min(fits, key=lambda plan: plan.work, default=None)
    whole = now.bytes + now.saved

    def cost_of(plan: _Plan) -> float:
        return _FAIR_PRICE * plan.bytes / whole + plan.work

    best = min(plans, key=cost_of, default=None)
    is_worth = best and cost_of(best) < _FAIR_PRICE * now.bytes / whole
    return best if is_worth else None


class _Peak:
    """The tensors that are alive when a step needs the most memory.

    Args:
        timeline: the timeline.
        sizes: the sizes of its tensors.
        parts: as for ``rematerialize``.
        whole: the bytes that a tower has at a time without a plan.

    Attributes:
        timeline: as given, like the next two.
        sizes: as given.
        parts: as given.
        estimate: what each event takes without a plan.
        events: what happens in the step, in order.
        used: for each of them the positions of what it uses.
        peak: the position of the event that needs most memory.
        operations: the operations among them, by their positions.
        work: how much each of them is to compute, as part of all work.
        on_towers: the positions of the operations that towers run.
        pure: the positions of those of them that give the same once more.
    """

    def __init__(
        self, timeline: Timeline, sizes: TensorSizes, parts: int, whole: int
    ):
        self.timeline, self.sizes, self.parts = timeline, sizes, parts
        estimate = self.estimate = MemoryEstimate(timeline, sizes, parts)
        self.events: Sequence[Event] = estimate.events
        program = timeline.program
        self._positions = {id(e): k for k, e in enumerate(self.events)}
        self.used = [self._made_at(event.used) for event in self.events]
        live = estimate.live
        self.peak: int = max(range(len(live)), key=live.__getitem__, default=0)
        self._bytes_of = estimate.bytes_of
        self._whole_bytes = whole or 1
        self.operations: dict[int, Operation] = {
            k: e for k, e in enumerate(self.events) if isinstance(e, Operation)
        }
        work = {k: sizes.work_of(o) for k, o in self.operations.items()}
        whole_work = sum(work.values()) or 1
        self.work: dict[int, float] = {
            k: own / whole_work for k, own in work.items()
        }
        self.on_towers: set[int] = {
            k for k, o in self.operations.items() if o.phase is Phase.TOWERS
        }
        self.pure: set[int] = {
            k for k in self.on_towers if is_pure(self.operations[k])
        }
        # By what they gather: the gathers of weights in shards.
        self._gathers: dict[Tensor, list[Exchange]] = {}
        for exchange in program.exchanges:
            given = exchange.given
            if exchange.kind == "gather" and not depends_on_batch([given]):
                self._gathers.setdefault(given, []).append(exchange)
        self._exchanged = {e.result: e for e in program.exchanges}
        # How many bytes that the backward pass uses are made up to a position,
        # and how many pass it to be used before the peak.
        held, crossing = ([0] * (self.peak + 2) for _ in range(2))
        for tensor, users in estimate.users.items():
            made = next(iter(self._made_at([tensor])), None)
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
        """Yield the plans to try, none of which is worse than one that fits.

        Args:
            limit: the bytes to stay below.
            most_work: the part of the work that may be computed again.
        """
        prices = [p for p in _PRICES if limit or p <= _FAIR_PRICE]
        for number in _SEGMENTS:
            size = self._held[self.peak + 1] / number
            bounds = ends_of_segments(self._held, self._crossing, size)
            # What is used next may be kept.
            for count in {len(bounds), max(1, len(bounds) - 1)}:
                division = self._divided(bounds, count)
                used = self._used_late(division)
                low, high = 0, len(prices) - 1
                middle = high
                while low <= high:
                    chosen = dataclasses.replace(
                        division, kept={*division.kept}
                    )
                    self._keep(chosen, used, prices[middle])
                    plan = _Plan(self, chosen)
                    # At a higher price, more is computed again.
                    if plan.work > most_work:
                        high = middle - 1
                    elif plan.bytes <= limit:
                        yield plan
                        high, most_work = middle - 1, plan.work
                    else:
                        yield plan
                        low = middle + 1
                    middle = (low + high) // 2

    def plans_of(self, segments: Segments) -> Iterator[_Plan]:
        """Yield the plans with the given segments."""
        for division in segments.divisions(self.events):
            yield _Plan(self, division)

    def _divided(self, bounds: Sequence[int], count: int) -> Division:
        """Return the first of the segments with given ends."""
        ends = [0, *bounds[:count]]
        segments: list[int | None] = [None] * len(self.events)
        for segment, (start, end) in enumerate(itertools.pairwise(ends)):
            segments[start:end] = [segment] * (end - start)
        return Division(segments.__getitem__, self.peak.__lt__)

    def _used_late(self, division: Division) -> dict[int, list[int]]:
        """Return what is used of each segment; keep what towers do not use."""
        used: dict[int, list[int]] = collections.defaultdict(list)
        for position, made in enumerate(self.used):
            if not division.is_late(position):
                continue
            if position not in self.on_towers:
                division.kept.update(made)
                continue
            for other in made:
                segment = division.segment_of(other)
                if segment is not None:
                    used[segment].append(other)
        return used

    def _keep(
        self, division: Division, used: Mapping[int, list[int]], price: float
    ) -> None:
        """Choose what of the segments is kept.

        Args:
            division: the segments.
            used: what is used of each.
            price: the work that keeping bytes may save, both as parts of those
                of the whole step.
        """
        for segment in sorted(used, key=lambda s: max(used[s]), reverse=True):
            while True:
                users = self.users_in(segment, used[segment], division)
                found = self._worth_keeping(users, segment, division, price)
                if not found:
                    break
                division.kept.update(found)
            # What it takes from earlier segments is kept there.
            division.kept.update(
                p for p in users if not self.runs_again(p, segment, division)
            )

    def users_in(
        self, segment: int, used: Iterable[int], division: Division
    ) -> dict[int, set[float]]:
        """Return what a segment needs to run again, and for what.

        It may be kept. What that needs is not included.
        """
        users: dict[int, set[float]] = collections.defaultdict(set)
        waiting: list[tuple[int, float]] = [(p, ALWAYS) for p in used]
        while waiting:
            position, user = waiting.pop()
            is_new = position not in users
            users[position].add(user)
            if is_new and self.runs_again(position, segment, division):
                waiting += [(other, position) for other in self.used[position]]
        return users

    def _worth_keeping(
        self,
        users: Mapping[int, Collection[float]],
        segment: int,
        division: Division,
        price: float,
    ) -> set[int]:
        """Return which results to keep in a segment, for a price."""
        work: dict[int, float] = {}
        costs: dict[int, float] = {}
        for position in users:
            event = self.events[position]
            made = sum(map(self._bytes_of, event.made))
            cost = price * made / self._whole_bytes
            if self.runs_again(position, segment, division):
                work[position] = self.work[position]
                costs[position] = cost
            else:
                # It has to be kept for what is computed from it.
                work[position] = 0 if position in division.kept else cost
                costs[position] = math.inf
        return worth_keeping(users, work, costs)

    def runs_again(
        self, position: int, segment: int, division: Division
    ) -> bool:
        """Whether an operation runs again in a segment, if it is needed."""
        return (
            position in self.pure
            and position not in division.kept
            and division.segment_of(position) == segment
        )

    def _made_at(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the positions of the operations that make tensors."""
        found = (self._positions.get(id(t.operation)) for t in tensors)
        return [position for position in found if position is not None]

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
            if self.timeline.levels[other] < level
            and other.is_own == exchange.is_own
            and other.over == exchange.over
            and other.part == exchange.part
        ]
        last = max(
            found, key=self.timeline.levels.__getitem__, default=exchange
        )
        return last.result


class _Plan:
    """A plan: the copies of what runs again, right before those that use them.

    Args:
        peak: the peak that they lower.
        division: what is computed again, and where.

    Attributes:
        events: all that happens in the step, in order.
        again: the positions of those of which there are copies.
        begins: the first copy of each segment.
        work: how much is computed again, as part of all work.
    """

    def __init__(self, peak: _Peak, division: Division):
        self._peak, self._division = peak, division
        self.again: list[int] = []
        self.begins: list[Event] = []
        self._begun: set[int | None] = set()
        self._copied: dict[Tensor, Tensor] = {}
        # What operations use that use copies, and what first copies wait for.
        self._inputs: dict[Operation, Sequence[Tensor]] = {}
        self._waits: dict[Operation, Sequence[Operation]] = {}
        self.events: list[Event] = []
        self._levels: dict[Event, int] = {}
        # The last operations of the backward pass so far.
        entered: Sequence[Operation] = ()
        for position, event in enumerate(peak.events):
            if position in peak.on_towers and division.is_late(position):
                made = filter(division.is_late, peak.used[position])
                entered = [peak.operations[p] for p in made] or entered
                self._use_copies(position, entered)
            self.events.append(event)
        self.work: float = sum(peak.work[p] for p in self.again)

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes that a tower then has at a time."""
        estimate = self._peak.estimate.with_copies(
            self.events, self._levels, self._inputs
        )
        return estimate.peak_bytes()

    def _with_copies(self) -> Timeline:
        """Return the timeline with the copies, which nobody uses yet."""
        before = self._peak.timeline
        repeated = filter(is_repeated, before.program.events)
        events = [*repeated, *self.events]
        program = dataclasses.replace(before.program, events=events)
        return dataclasses.replace(
            before,
            program=program,
            levels={**before.levels, **self._levels},
            waits={**before.waits, **self._waits},
        )

    def used(self) -> tuple[Timeline, Mapping[Event, Event]]:
        """Return the timeline in which operations use the copies.

        And by each event the one in its place.
        """
        timeline = self._with_copies()
        return timeline.with_inputs(self._inputs, self._peak.sizes)

    def _use_copies(self, late: int, entered: Sequence[Operation]) -> None:
        """Add the copies that an operation uses, given its position."""
        peak, division = self._peak, self._division
        user, needed = peak.operations[late], set[int]()
        for position in peak.used[late]:
            segment = division.segment_of(position)
            if segment is not None and position not in division.kept:
                users = peak.users_in(segment, [position], division)
                runs = (peak.runs_again(p, segment, division) for p in users)
                needed.update(itertools.compress(users, runs))
        first, level = len(self.events), self._peak.timeline.levels[user]
        for position in sorted(needed):
            self._copy(position, level, entered)
        # Its copy is kept from then on.
        division.kept.update(needed)
        segments = {division.segment_of(n) for n in needed}
        if not segments <= self._begun:
            self._begun |= segments
            self.begins.append(self.events[first])
        inputs = [self._copied.get(tensor, tensor) for tensor in user.inputs]
        if inputs != [*user.inputs]:
            self._inputs[user] = inputs

    def _copy(
        self, position: int, level: int, entered: Sequence[Operation]
    ) -> None:
        """Add a copy of an operation to a level."""
        original = self._peak.operations[position]
        inputs = [self._taken(tensor, level) for tensor in original.inputs]
        suffix = f"{original.suffix}_again"
        copy = with_inputs(original, inputs, suffix=suffix)
        if entered and not any(t in self._copied for t in original.inputs):
            self._waits[copy] = entered
        self._copied.update(zip(original.outputs, copy.outputs, strict=True))
        self._peak.sizes.add_like(copy.outputs, original.outputs)
        self.again.append(position)
        self.events.append(copy)
        self._levels[copy] = level

    def _taken(self, tensor: Tensor, level: int) -> Tensor:
        """Return the tensor that a copy takes in place of another."""
        if tensor in self._copied:
            return self._copied[tensor]
        return self._peak.gathered_near(tensor, level)
