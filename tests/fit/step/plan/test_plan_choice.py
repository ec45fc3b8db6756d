"""``step/plan_search.py``: which plan is taken, given what each one needs.

No model, no graph: a step here is a few numbers.
"""

import dataclasses
import itertools
import math
import types

import pytest

from keras_towers.fit.options import StrategyOptions
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.graph.step_layout import (
    MemoryPlan,
    StepLayout,
    StepSettings,
)
from keras_towers.fit.step.plan.dry_run import Needs
from keras_towers.fit.step.plan.memory_messages import how_it_fits
from keras_towers.fit.step.plan.plan_search import PlanSearch, Room
from keras_towers.partition.ir.program import Exchange, Program
from keras_towers.partition.timeline.memory_estimate import ALIKE
from keras_towers.partition.timeline.timeline import StepPlan, Timeline

pytestmark = pytest.mark.core

MODEL = types.SimpleNamespace(jit_compile=False)
COMPILED = types.SimpleNamespace(jit_compile=True)
SHARDS = (None, "updates", "weights")


def gather_of(size):
    """An exchange that gathers so many bytes of variables."""
    shape = types.SimpleNamespace(num_elements=lambda: size)
    dtype = types.SimpleNamespace(size=1)
    result = types.SimpleNamespace(shape=shape, dtype=dtype)
    return Exchange("gather", types.SimpleNamespace(axes=()), result)


@dataclasses.dataclass
class Numbers:
    """What a step of one micro-batch needs, and what saves how much of it.

    Attributes:
        kept: the bytes of activations, which parts divide.
        fixed: the bytes that parts do not divide.
        sums: the bytes of the sums of gradients of several parts.
        remat: the part of activations that may be computed again.
        work: what that takes, as a part of the step's work.
        weights: the bytes of weights.
        slots: the bytes of slots.
        devices: the number of devices that divide them.
        multiplications: the multiplications of the step.
    """

    kept: int = 8000
    fixed: int = 100
    sums: int = 0
    remat: float = 0.5
    work: float = 0.3
    weights: int = 0
    slots: int = 0
    devices: int = 4
    multiplications: float = 1e9

    def held(self, shards):
        weights, slots = self.weights, self.slots
        if shards is not None:
            slots //= self.devices
        if shards == "weights":
            weights //= self.devices
        return Needs([weights], [slots], None, None, ())

    def schedule(self, layout, limits, gather_bytes):
        """Compute as little again as limits allow."""
        parts = layout.settings.places.micro_batches
        kept = self.kept // parts
        whole = kept + self.fixed
        if parts > 1:
            whole += self.sums
        exchanges = []
        if layout.traced == "weights":
            whole += gather_bytes
            # What a tower cannot keep, it gathers again.
            again = max(0, self.weights - gather_bytes)
            exchanges.append(gather_of(self.weights + again))
        most = int(kept * self.remat)
        saved = (
            most
            if limits.limit == 0
            else min(most, max(0, whole - limits.limit))
        )
        work = self.work * saved / most if most else 0.0
        if work > limits.most_work:
            saved, work = 0, 0.0
        plan = StepPlan(
            bytes=whole - saved,
            parts=parts,
            recomputed=saved,
            work=work,
            saved=saved,
            multiplications=self.multiplications,
        )
        program = Program(None, exchanges, {}, [], [], {}, {})
        return dataclasses.replace(
            layout, timeline=Timeline(program, {}, plan=plan)
        )


class Search(PlanSearch):
    """A search, and how often it has laid a step out."""

    def __init__(
        self,
        numbers,
        size=math.inf,
        choices=(None,),
        options=None,
        model=MODEL,
        rows=64,
        fewest=1,
        failed=None,
        largest=0,
        gather_bytes=0,
    ):
        self.laid_out = []
        places = Places(Ranks(), [["/device:CPU:0"]], fewest)
        settings = StepSettings(
            model, "fit", places, {}, rows=rows, failed=failed
        )
        room = Room(size, choices, numbers.held, largest, gather_bytes)

        def lay_out(settings, fewer):
            self.laid_out.append(settings.places.micro_batches)
            assert (fewer is None) == (len(self.laid_out) == 1)
            # Which option divides variables stands for the trace.
            return StepLayout(choices[0], None, settings, None, {}, None)

        super().__init__(
            options or StrategyOptions(),
            settings,
            room,
            lay_out,
            numbers.schedule,
        )


def chosen(*args, **options):
    return Search(*args, **options).best()


def summary(found):
    return found.plan.shards, found.plan.micro_batches, found.computes_again


def test_what_fits_as_it_is_stays_so():
    search = Search(Numbers(weights=1000, slots=2000), 11_100, SHARDS)
    found = search.best()
    assert summary(found) == (None, 1, False)
    assert found.fits and found.extra_time == 0 and found.plan.total == 11_100
    assert search.needed == 11_100 and search.laid_out == [1]
    assert search.next_cheaper(found) is None


def test_without_a_known_memory_a_step_stays_as_it_is():
    found = chosen(Numbers(), choices=["updates"])
    assert summary(found) == ("updates", 1, False) and not found.is_compared


LARGE_WEIGHTS = Numbers(weights=9000)
SLOW_LINKS = dataclasses.replace(LARGE_WEIGHTS, multiplications=1e5)


@pytest.mark.parametrize(
    ("numbers", "size", "wanted"),
    [
        # A tenth of what may be computed again takes 3 % of the step's work,
        (Numbers(), 7700, (None, 1, True)),
        # or half of it; two parts take less.
        (Numbers(work=5.0), 7700, (None, 2, False)),
        # Slots in shards take least.
        (Numbers(work=5.0, slots=4000), 11_500, ("updates", 1, False)),
        # With weights in shards, towers send them once more,
        (LARGE_WEIGHTS, 14_000, ("weights", 1, False)),
        # which takes longer than two parts if links are slow.
        (SLOW_LINKS, 14_000, (None, 2, False)),
        # Only shards and parts together fit.
        (LARGE_WEIGHTS, 2900, ("weights", 16, False)),
    ],
)
def test_the_cheapest_that_fits_is_taken(numbers, size, wanted):
    found = chosen(numbers, size, SHARDS)
    assert found.fits and found.plan.total <= size
    assert summary(found) == wanted


@pytest.mark.parametrize(("work", "parts"), [(1.2, 1), (1.8, 2)])
def test_of_plans_that_take_as_long_the_first_is_kept(work, parts):
    """What is computed again is a tenth: 12 or 18 % more, or 5 % in parts."""
    assert chosen(Numbers(work=work), 7700).plan.micro_batches == parts


@pytest.mark.parametrize("now", [None, "weights"])
@pytest.mark.parametrize(
    "numbers",
    [
        Numbers(),
        Numbers(work=5.0, sums=900),
        Numbers(weights=3000, slots=6000, sums=3000),
        Numbers(weights=3000, slots=6000, remat=0.0),
        Numbers(weights=9000, slots=100, fixed=3000),
        SLOW_LINKS,
    ],
)
def test_a_smaller_memory_never_gets_a_plan_that_needs_more(numbers, now):
    choices = SHARDS[SHARDS.index(now) :]
    needed, fitted = [], []
    for size in range(20_000, 0, -50):
        found = chosen(numbers, size, choices, largest=100, gather_bytes=2000)
        needed.append(found.plan.total)
        fitted.append(found.fits)
        assert found.fits == (found.plan.total <= size)
    # What fits comes first.
    assert fitted == sorted(fitted, reverse=True) and len({*fitted}) == 2
    assert len({*needed}) > 5
    for more, less in itertools.pairwise(needed):
        assert less <= ALIKE * more


def test_of_cheaper_plans_the_dearest_that_does_not_fit_is_said():
    numbers = dataclasses.replace(SLOW_LINKS, slots=400, remat=0.0)
    search = Search(numbers, 14_000, SHARDS)
    found = search.best()
    assert summary(found) == (None, 2, False)
    cheaper = search.next_cheaper(found)
    # The step as it is takes less; weights in shards would take more.
    assert summary(cheaper) == ("updates", 1, False)
    assert cheaper.plan.total == 17_200 and not cheaper.fits

    def said(whole):
        options = StrategyOptions()
        return how_it_fits(found, options, False, "14 KB", whole, cheaper)

    assert said(17_500) == (
        "processes a tower's rows in 2 parts: 14 KB, and it needs 13.5 KB "
        "instead of 17.5 KB on each device; a cheaper plan would need "
        "17.2 KB, and does not fit"
    )
    # It is the step as it is, whose bytes are said already.
    assert said(17_200).endswith(" instead of 17.2 KB on each device")


def test_options_that_are_given_are_kept():
    slow = Numbers(work=5.0)
    by_hand = {"model": COMPILED}, {"rows": None}
    for options in by_hand:
        assert summary(chosen(slow, 7700, **options)) == (None, 1, True)
    whole = StrategyOptions(remat=False)
    found = chosen(Numbers(), 7700, options=whole)
    assert summary(found) == (None, 2, False)
    assert not chosen(Numbers(), 7700, options=whole, rows=None).fits
    # What the user wants computed again takes no time that is compared.
    again = chosen(Numbers(), 7700, options=StrategyOptions(remat=True))
    assert summary(again) == (None, 1, False) and again.plan.bytes == 4100
    assert chosen(slow, 7700, ("updates",)).plan.shards == "updates"


def test_weights_are_gathered_as_far_as_there_is_room():
    """What is given is kept; otherwise 8 or 2 of the largest may do."""
    room = {"choices": ("weights",), "gather_bytes": 3000, "largest": 100}
    numbers = Numbers(1000, remat=0.0, weights=4000, multiplications=1e6)
    for size, gathered in [(5100, 3000), (3000, 800), (2400, 200)]:
        found = chosen(numbers, size, rows=None, **room)
        assert found.fits and found.plan.total == 2100 + gathered
    given = StrategyOptions(weights="sharded", gather_bytes=3000)
    assert not chosen(numbers, 3000, rows=None, options=given, **room).fits


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"rows": 6}, [1, 2, 4, 6]),
        ({"rows": 6, "fewest": 4}, [4, 6]),
        ({"rows": 1}, [1]),
        ({"rows": None}, [1]),
        ({"model": COMPILED}, [1]),
    ],
)
def test_a_row_is_the_smallest_part(options, wanted):
    search = Search(Numbers(), 10, **options)
    assert not search.best().fits
    assert search.laid_out == wanted


def test_parts_end_where_twice_as_many_save_little():
    """Whatever the limit is, so the smallest plan is nearly the same."""
    for size in (10, 40_000, 100_000):
        search = Search(Numbers(fixed=100_000), size, rows=1024)
        found = search.best()
        assert search.laid_out == [1, 2, 4] and not found.fits
        assert found.plan.total == 101_100 - 100
    # Here they end once the rest of the step is nearly all of it.
    search = Search(Numbers(), 10, rows=2**20)
    assert search.best().plan.total == 101
    assert search.laid_out[-1] == 4096


def test_parts_go_on_past_two_that_save_nothing():
    """With two come sums of gradients."""
    search = Search(Numbers(sums=5000, remat=0.0), 5700)
    assert summary(search.best()) == (None, 16, False)
    assert search.laid_out == [1, 2, 4, 8, 16]


def test_parts_end_with_the_first_that_bring_nothing_cheaper():
    # Each time, less is computed again, until nothing is.
    search = Search(Numbers(work=2.0), 4200)
    assert summary(search.best()) == (None, 2, False)
    assert search.laid_out == [1, 2]
    search = Search(Numbers(work=2.0, sums=9000), 4200)
    assert summary(search.best()) == (None, 1, True)
    assert search.laid_out == [1, 2]


def test_if_nothing_fits_the_smallest_is_taken():
    search = Search(Numbers(weights=1000, slots=2000), 500, SHARDS, rows=4)
    found = search.best()
    assert summary(found) == ("weights", 4, True) and not found.fits
    assert found.plan.total == 250 + 500 + 1000 + 100
    # Bytes of another layout are only estimated, so the most is divided.
    room = {"largest": 1000, "gather_bytes": 9000}
    numbers = Numbers(weights=1000, slots=2000)
    assert chosen(numbers, 500, SHARDS, **room).plan.shards == "weights"


@pytest.mark.parametrize("size", [math.inf, 20_000])
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # Two parts, and a fiftieth of what they may compute again.
        ({}, (None, 2, True)),
        ({"model": COMPILED}, (None, 2, True)),
        ({"rows": None}, (None, 1, True)),
        ({"fewest": 2}, (None, 2, True)),
    ],
)
def test_once_memory_has_run_out_a_plan_needs_less(size, options, wanted):
    failed = MemoryPlan(options.get("fewest", 1), 8100)
    found = chosen(Numbers(work=0.8), size, failed=failed, **options)
    assert summary(found) == wanted
    assert found.fits and found.plan.needs_less_than(failed)
    assert found.plan.bytes <= 4100


def test_once_memory_has_run_out_the_same_plan_does_not_fit():
    whole = StrategyOptions(remat=False)
    failed = MemoryPlan(1, 8100)
    assert not chosen(Numbers(), options=whole, rows=None, failed=failed).fits
