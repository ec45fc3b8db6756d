"""The search for the cheapest plan of a step that fits into memory.

A plan says how variables are divided over towers, in how many micro-batches a
tower computes, what it computes again, and how many gathered weights it has at
a time. No plan changes a result, so all of these are moves, except what the
user has chosen. The cheapest plan is the one whose step is predicted to take
the least time. A smaller limit never leads to a plan that needs more.

If a plan divides variables further, the step has to be traced again. Until
then, the bytes that it needs are estimated from the present layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from keras_towers.fit.options import Shards, StrategyOptions
from keras_towers.fit.step.graph.step_layout import (
    MemoryPlan,
    StepLayout,
    StepSettings,
)
from keras_towers.fit.step.plan.dry_run import Needs
from keras_towers.partition.timeline.gathers import gathers_variables
from keras_towers.partition.timeline.kept_results import KEEP_ALL, RematLimits
from keras_towers.partition.timeline.memory_estimate import ALIKE

# All times here are parts of the time of the step as it is. They only order
# plans, and no user is told them. None of these numbers has been measured.

# The multiplications that a device does while its link moves a byte. Assumed:
# it differs by device and link.
_MULTIPLICATIONS_PER_BYTE = 64
# What variables in shards take besides what is sent. Assumed: of plans that
# send as much, the one that divides less is to be taken.
_TIME_OF_SHARDS = {None: 0.0, "updates": 0.01, "weights": 0.02}
# What each doubling of the number of micro-batches takes, since a device does
# smaller operations less well. Assumed.
_TIME_OF_DOUBLING = 0.05
# Plans that could save less time are not worth being planned. Assumed: times
# are predicted no better.
_ALIKE_TIMES = 0.1
# How many times the largest weight a tower may have gathered at a time, if less
# than options say is to do. Assumed: with 8, it gathers ahead of its use; with
# 2, it gathers one while it uses another. Two ranks of Horovod on CPUs took as
# long with a quarter of the model as with all (``benchmarks/README.md``).
_GATHERED_WEIGHTS = 8, 2
# How many times less a step is to need once memory has run out. Assumed: the
# estimate was too low, and nobody knows by how much.
_TIMES_LESS = 2


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory of a device for a step and its variables.

    Attributes:
        size: the bytes that it has; infinite: they are unknown.
        choices: the options that may divide variables, from that of the present
            layout, or None, to the one that saves most.
        held_by: returns what devices hold if an option divides variables; None:
            that is not compared.
        largest: the bytes of the largest weight.
        gather_bytes: the bytes of gathered weights at a time, as options say.
    """

    size: float = math.inf
    choices: Sequence[Shards | None] = (None,)
    held_by: Callable[[Shards | None], Needs] | None = None
    largest: int = 0
    gather_bytes: int = 0

    @property
    def is_known(self) -> bool:
        """Whether it is known what the device has."""
        return self.size < math.inf

    def held(self, shards: Shards | None) -> int:
        """Return the bytes of variables if an option divides them."""
        return 0 if self.held_by is None else self.held_by(shards).held

    def elsewhere(self) -> int:
        """Return the bytes of weights in shards that other devices have."""
        if self.held_by is None:
            return 0
        whole, in_shards = map(self.held_by, (self.choices[0], "weights"))
        return max(whole.weights) - max(in_shards.weights)


@dataclasses.dataclass(frozen=True)
class _Move:
    """A plan but for what is computed again.

    Attributes:
        shards: the option that divides variables.
        micro_batches: the number of micro-batches of a tower.
        gather_bytes: the bytes of gathered weights at a time; None: as options
            say.
    """

    shards: Shards | None
    micro_batches: int
    gather_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan that was tried.

    Attributes:
        layout: the step, with its timeline.
        plan: what it needs.
        extra_time: the time that it takes beyond that of the step as it is, as
            a part of the latter.
        fits: whether it fits, as far as is known.
        computes_again: whether memory requires that it computes again.
        is_compared: whether its bytes are known to be those of a device.
    """

    layout: StepLayout
    plan: MemoryPlan
    extra_time: float
    fits: bool
    computes_again: bool
    is_compared: bool

    @property
    def whole(self) -> int:
        """The bytes that it would need if nothing were computed again."""
        return self.plan.total + self.layout.scheduled.plan.saved


class PlanSearch:
    """Searches a plan for a step.

    Args:
        options: what the user has chosen.
        settings: what the step is traced for; its micro-batches are the fewest.
        room: what a device has.
        lay_out: lays the step out, given a layout for fewer micro-batches.
        schedule: returns a layout with its timeline, given what may be computed
            again, and the bytes of gathered weights at a time.

    Attributes:
        needed: the bytes that the step needs as it is.
    """

    needed: int = 0

    def __init__(
        self,
        options: StrategyOptions,
        settings: StepSettings,
        room: Room,
        lay_out: Callable[[StepSettings, StepLayout | None], StepLayout],
        schedule: Callable[[StepLayout, RematLimits, int], StepLayout],
    ):
        self._options, self._settings, self._room = options, settings, room
        self._lay_out, self._schedule = lay_out, schedule
        self._now: Shards | None = room.choices[0]
        self._layouts: dict[int, StepLayout] = {}
        # The bytes of weights that the step gathers as options say.
        self._gathered: int | None = None
        self._tried: dict[_Move, Tried] = {}

    def best(self) -> Tried:
        """Return the cheapest plan that fits; if none does, the smallest."""
        first = self._try(_Move(self._now, self._fewest))
        self.needed = first.whole
        if first.fits and first.extra_time == 0:
            return first
        best: Tried | None = None
        for number in self._numbers_of_parts():
            before = best
            for move in self._moves(number):
                most = math.inf if best is None else best.extra_time
                least = self._time_of_parts(number)
                least += self._time_of_shards(move, first.layout)
                if least + _ALIKE_TIMES < most:
                    found = self._try(move, most - least)
                    if found.fits and found.extra_time < most:
                        best = found
            if best is not None and best is before:
                # Twice as many parts then save half as much more.
                break
            if best is None and not self._saves(number):
                break
        if best is None:
            # What the present layout does not have is only estimated.
            last = self._choices()[-1]
            tried = [t for t in self._tried.values() if t.plan.shards == last]
            best = min(tried, key=lambda found: found.plan.total)
        return best

    def next_cheaper(self, chosen: Tried) -> Tried | None:
        """Return the dearest of the plans that cost less, and do not fit."""
        others = [
            found
            for found in self._tried.values()
            if found.extra_time < chosen.extra_time and not found.fits
        ]
        return max(others, key=lambda found: found.extra_time, default=None)

    @property
    def _fewest(self) -> int:
        return self._settings.places.micro_batches

    def _numbers_of_parts(self) -> Iterable[int]:
        number, rows = self._fewest, self._settings.rows
        yield number
        # XLA keeps less than the estimate.
        known = not self._settings.xla or self._settings.failed is not None
        while known and rows is not None and number < rows:
            number = min(2 * number, rows)
            yield number

    def _saves(self, number: int) -> bool:
        """Whether this many parts need clearly less than fewer parts do.

        What is computed again depends on the limit, so it does not count: a
        smaller limit then needs no more, but for what is alike. Sums of
        gradients come with the first two parts, so one part does not count.
        """
        fewer = self._least_whole(range(2, number))
        return self._least_whole([number]) * ALIKE < fewer

    def _least_whole(self, numbers: Container[int]) -> float:
        """Return the least of ``whole`` with some numbers of parts."""
        tried = self._tried.values()
        found = [t.whole for t in tried if t.plan.micro_batches in numbers]
        return min(found, default=math.inf)

    def _time_of_parts(self, number: int) -> float:
        return _TIME_OF_DOUBLING * math.log2(number / self._fewest)

    def _moves(self, number: int) -> Iterator[_Move]:
        """Yield the moves with a number of micro-batches.

        Only if the one that gathers least fits, those that gather more follow,
        from the most on, until one of them fits: they cost less.
        """
        *more, least = [
            _Move(self._now, number, size) for size in self._gather_bytes()
        ]
        yield least
        for move in more:
            if not self._fits_with(least):
                break
            yield move
            if self._fits_with(move):
                break
        for shards in self._choices():
            if shards != self._now:
                yield _Move(shards, number)

    def _fits_with(self, move: _Move) -> bool:
        """Whether a move was tried, and fits."""
        return move in self._tried and self._tried[move].fits

    def _choices(self) -> Sequence[Shards | None]:
        """Return the options of use: each one leaves more room than before."""
        room = self._room
        useful: list[Shards | None] = []
        for shards in room.choices:
            held = room.held(shards)
            if not useful or held * ALIKE < room.held(useful[-1]):
                useful.append(shards)
        return [s for s in useful if room.held(s) < room.size] or useful[-1:]

    def _gather_bytes(self) -> Sequence[int | None]:
        """Return the bytes to gather at a time, from the most on."""
        if self._now != "weights" or self._options.gathered_bytes:
            return [None]
        room = self._room
        fewer = [number * room.largest for number in _GATHERED_WEIGHTS]
        return [None, *(size for size in fewer if size < room.gather_bytes)]

    def _try(self, move: _Move, most_work: float = math.inf) -> Tried:
        """Plan a step with a move, and with as little remat as possible.

        Args:
            move: the move.
            most_work: the part of the step's work that may be computed again;
                with more, the plan would be of no use.
        """
        if move not in self._tried:
            is_there = move.shards == self._now
            plan = self._planned if is_there else self._estimated
            self._tried[move] = plan(move, most_work)
        return self._tried[move]

    def _estimated(self, move: _Move, most_work: float) -> Tried:
        """Estimate a plan whose layout is another one."""
        room, absent = self._room, 0
        if move.shards == "weights":
            # Of the gathered weights at least two: one is used.
            two = min(_GATHERED_WEIGHTS) * room.largest
            absent = min(room.gather_bytes, two)
        number, held = move.micro_batches, room.held(move.shards)
        now = self._try(_Move(self._now, number, self._gather_bytes()[-1]))
        plan = MemoryPlan(number, now.plan.bytes + absent, held, move.shards)
        if number == self._fewest and plan.total <= room.size:
            # With more room, less is computed again.
            return self._planned(move, most_work, absent)
        extra_time = now.extra_time + self._time_of_shards(move, now.layout)
        return dataclasses.replace(
            now, plan=plan, extra_time=extra_time, fits=self._fits(plan)
        )

    def _planned(self, move: _Move, most_work: float, absent: int = 0) -> Tried:
        """Plan a step beside the variables that a device holds.

        Args:
            move: the plan but for what is computed again.
            most_work: as for ``_try``.
            absent: the bytes of gathered weights that the present layout does
                not have.
        """
        room, gathered = self._room, move.gather_bytes
        held = room.held(move.shards)
        limits = self._limits(max(room.size - held - absent, 0), most_work)
        layout = self._schedule(
            self._laid_out(move.micro_batches),
            limits,
            room.gather_bytes if gathered is None else gathered,
        )
        planned = layout.scheduled.plan
        plan = MemoryPlan(
            move.micro_batches, planned.bytes + absent, held, move.shards
        )
        exceeds = planned.bytes + planned.saved > limits.limit > 0
        # What the user has marked is computed again in any case.
        again = exceeds and planned.recomputed > 0
        extra_time = planned.work if again else 0.0
        extra_time += self._time_of_parts(move.micro_batches)
        extra_time += self._time_of_shards(move, layout)
        layout = dataclasses.replace(layout, plan=plan)
        return Tried(
            layout,
            plan,
            extra_time,
            fits=self._fits(plan),
            computes_again=again,
            is_compared=room.is_known or self._settings.failed is not None,
        )

    def _time_of_shards(self, move: _Move, layout: StepLayout) -> float:
        """Return what shards take more than those of the step as it is."""
        gathered = _gathered_in(layout)
        if self._gathered is None:
            self._gathered = gathered
        sent = gathered - self._gathered
        if move.shards == "weights" and self._now != "weights":
            # Once more, for the backward pass.
            sent += self._room.elsewhere()
        work = layout.scheduled.plan.multiplications or 1.0
        more = _TIME_OF_SHARDS[move.shards] - _TIME_OF_SHARDS[self._now]
        return more + sent * _MULTIPLICATIONS_PER_BYTE / work

    def _laid_out(self, number: int) -> StepLayout:
        if number not in self._layouts:
            fewer = next(reversed(self._layouts.values()), None)
            places = dataclasses.replace(
                self._settings.places, micro_batches=number
            )
            settings = dataclasses.replace(self._settings, places=places)
            self._layouts[number] = self._lay_out(settings, fewer)
        return self._layouts[number]

    def _limits(self, room: float, most_work: float) -> RematLimits:
        """Return the limits for recomputing.

        Args:
            room: the bytes that a step may need.
            most_work: as for ``_try``.
        """
        option, failed = self._options.remat, self._settings.failed
        if option is None:
            most = math.inf if failed is None else failed.bytes / _TIMES_LESS
            return RematLimits(max(min(room, most), 1), most_work)
        if option is False:
            return KEEP_ALL
        return RematLimits(0) if option is True else RematLimits(0, option)

    def _fits(self, plan: MemoryPlan) -> bool:
        failed = self._settings.failed
        if failed is not None and not plan.needs_less_than(failed):
            return False
        return plan.total <= self._room.size


def _gathered_in(layout: StepLayout) -> int:
    """Return the bytes of all weights that a step gathers."""
    number = 0
    for exchange in layout.scheduled.program.exchanges:
        if gathers_variables(exchange):
            count = exchange.result.shape.num_elements() or 0
            number += count * exchange.result.dtype.size
    return number
