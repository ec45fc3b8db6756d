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
from collections.abc import Callable, Iterable, Iterator, Sequence

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.options import Shards
from keras_towers.fit.step.graph.step_layout import (
    MemoryPlan,
    StepLayout,
    StepSettings,
    gather_bytes_for,
    with_timeline,
)
from keras_towers.fit.step.plan.dry_run import Needs
from keras_towers.partition.timeline.gathers import gathers_variables
from keras_towers.partition.timeline.kept_results import KEEP_ALL, RematLimits
from keras_towers.partition.timeline.memory_estimate import ALIKE

# The multiplications in the time of which a link between devices moves a byte.
_PER_SENT_BYTE = 64
# The part of a step's time that other plans of equal work take more: slots in
# shards, weights in shards, and each doubling of the number of micro-batches.
_FOR_SHARDS = {None: 0.0, "updates": 0.01, "weights": 0.02}
_FOR_DOUBLED_PARTS = 0.05
# Predictions that differ by less are alike.
_ALIKE_COSTS = 0.1
# How often the largest weight may be among those that a tower has gathered.
_LARGEST_GATHERED = 8, 2
# How many times less a step is to need once memory has run out.
_SHRINKS = 2


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
    """

    size: float = math.inf
    choices: Sequence[Shards | None] = (None,)
    held_by: Callable[[Shards | None], Needs] | None = None
    largest: int = 0

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
        cost: the time that it takes besides, as a part of the step's.
        fits: whether it fits, as far as is known.
        computes_again: whether memory requires that it computes again.
        is_compared: whether its bytes are known to be those of a device.
    """

    layout: StepLayout
    plan: MemoryPlan
    cost: float
    fits: bool
    computes_again: bool
    is_compared: bool


class PlanSearch:
    """Searches a plan for a step.

    Args:
        config: the towers.
        settings: what the step is traced for; its micro-batches are the fewest.
        room: what a device has.
        lay_out: lays the step out, given a layout for fewer micro-batches.

    Attributes:
        needed: the bytes that the step needs as it is.
    """

    needed: int = 0

    def __init__(
        self,
        config: TowerConfig,
        settings: StepSettings,
        room: Room,
        lay_out: Callable[[StepSettings, StepLayout | None], StepLayout],
    ):
        self._config, self._settings, self._room = config, settings, room
        self._lay_out = lay_out
        self._now: Shards | None = room.choices[0]
        self._layouts: dict[int, StepLayout] = {}
        # The bytes of weights that the step gathers as options say.
        self._gathered: int | None = None
        self._tried: dict[_Move, Tried] = {}

    def best(self) -> Tried:
        """Return the cheapest plan that fits; if none does, the smallest."""
        first = self._try(_Move(self._now, self._fewest))
        step = first.layout.scheduled.plan
        self.needed = first.plan.held + step.bytes + step.saved
        if first.fits and first.cost == 0:
            return first
        best: Tried | None = None
        for number in self._numbers_of_parts():
            before = best
            for move in self._moves(number):
                least = self._cost_of_parts(number)
                least += self._cost_of_shards(move, first.layout)
                if best is None or least + _ALIKE_COSTS < best.cost:
                    most = math.inf if best is None else best.cost - least
                    found = self._try(move, most)
                    if found.fits and (best is None or found.cost < best.cost):
                        best = found
            # Twice as many parts then save half as much more.
            if best is not None and best is before:
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
            if found.cost < chosen.cost and not found.fits
        ]
        return max(others, key=_cost, default=None)

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

    def _cost_of_parts(self, number: int) -> float:
        return _FOR_DOUBLED_PARTS * math.log2(number / self._fewest)

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

    def _smallest(self, number: int) -> Tried:
        """Try the plan that gathers least, with the present layout."""
        return self._try(_Move(self._now, number, self._gather_bytes()[-1]))

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
        if self._now != "weights" or self._config.options.gathered_bytes:
            return [None]
        most = gather_bytes_for(self._config, self._settings)
        fewer = [number * self._room.largest for number in _LARGEST_GATHERED]
        return [None, *(size for size in fewer if size < most)]

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

    def _planned(self, move: _Move, most_work: float) -> Tried:
        """Plan a step with the present layout."""
        held = self._room.held(move.shards)
        return self._tried_with(move, most_work, held, held, move.gather_bytes)

    def _estimated(self, move: _Move, most_work: float) -> Tried:
        """Estimate a plan whose layout is another one."""
        room = self._room
        held = beside = room.held(move.shards)
        if move.shards == "weights":
            # Of the gathered weights at least two: one is used.
            most = gather_bytes_for(self._config, self._settings)
            beside += min(most, min(_LARGEST_GATHERED) * room.largest)
        now = self._smallest(move.micro_batches)
        plan = MemoryPlan(
            move.micro_batches,
            now.plan.bytes + beside - held,
            held,
            move.shards,
        )
        if move.micro_batches == self._fewest and plan.total <= room.size:
            # With more room, less is computed again.
            return self._tried_with(move, most_work, held, beside)
        return dataclasses.replace(
            now,
            plan=plan,
            cost=now.cost + self._cost_of_shards(move, now.layout),
            fits=self._fits(plan),
        )

    def _tried_with(
        self,
        move: _Move,
        most_work: float,
        held: int,
        beside: int,
        gather_bytes: int | None = None,
    ) -> Tried:
        """Plan a step beside what a device holds.

        Args:
            move: the plan but for what is computed again.
            most_work: as for ``_try``.
            held: the bytes of variables.
            beside: these, and others that the present layout does not have.
            gather_bytes: as for ``with_timeline``.
        """
        limits = self._limits(max(self._room.size - beside, 0), most_work)
        layout = with_timeline(
            self._laid_out(move.micro_batches),
            self._config,
            limits,
            gather_bytes,
        )
        planned = layout.scheduled.plan
        plan = MemoryPlan(
            move.micro_batches, planned.bytes + beside - held, held, move.shards
        )
        exceeds = planned.bytes + planned.saved > limits.limit > 0
        # What the user has marked is computed again in any case.
        again = exceeds and planned.recomputed > 0
        cost = planned.work if again else 0.0
        cost += self._cost_of_parts(move.micro_batches)
        cost += self._cost_of_shards(move, layout)
        layout = dataclasses.replace(layout, plan=plan)
        return Tried(
            layout,
            plan,
            cost,
            fits=self._fits(plan),
            computes_again=again,
            is_compared=self._room.is_known
            or self._settings.failed is not None,
        )

    def _cost_of_shards(self, move: _Move, layout: StepLayout) -> float:
        gathered = _gathered_in(layout)
        if self._gathered is None:
            self._gathered = gathered
        sent = gathered - self._gathered
        if move.shards == "weights" != self._now:
            # Once more, for the backward pass.
            sent += self._room.elsewhere()
        work = layout.scheduled.plan.multiplications or 1.0
        cost = _FOR_SHARDS[move.shards] - _FOR_SHARDS[self._now]
        return cost + sent * _PER_SENT_BYTE / work

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
        option, failed = self._config.options.remat, self._settings.failed
        if option is None:
            most = math.inf if failed is None else failed.bytes / _SHRINKS
            return RematLimits(max(min(room, most), 1), most_work)
        if option is False:
            return KEEP_ALL
        return RematLimits(0) if option is True else RematLimits(0, option)

    def _fits(self, plan: MemoryPlan) -> bool:
        failed = self._settings.failed
        if failed is not None and not plan.needs_less_than(failed):
            return False
        return plan.total <= self._room.size


def _cost(tried: Tried) -> float:
    return tried.cost


def _gathered_in(layout: StepLayout) -> int:
    """Return the bytes of all weights that a step gathers."""
    number = 0
    for exchange in layout.scheduled.program.exchanges:
        if gathers_variables(exchange):
            count = exchange.result.shape.num_elements() or 0
            number += count * exchange.result.dtype.size
    return number
