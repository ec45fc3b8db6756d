"""Random programs against one device; each seed of the tests has others."""

import contextlib

import pytest

from keras_towers.partition.timeline.kept_results import KEEP_ALL, RematLimits
from keras_towers.partition.timeline.schedule import BatchSplit, schedule
from tests.kit.sampling import SEED, long_unless, sample_of
from tests.partition import kit
from tests.partition.random_programs import GIVEN, KINDS, Program

DRAWN, ALL = 2, 24
# Where a program needs least memory.
AGAIN = RematLimits(1)


def check(program, seed):
    """Check a program; return what of it is computed once."""
    found = kit.check_on_towers(
        program, *GIVEN, towers=kit.FEW, seed=seed, tolerance=2e-3
    )
    return kit.computed_once(found)


@pytest.mark.parametrize(
    "number", long_unless(lambda number: number < DRAWN, range(ALL))
)
def test_random_programs(number):
    seed = ALL * SEED + number
    program = Program(seed)
    try:
        check(program, seed)
    except kit.OneDeviceFails as error:
        pytest.skip(str(error))
    except Exception as error:
        # A program of fewer operations begins like one of more.
        error.add_note(f"Program({seed}) has {', '.join(program.drawn)}")
        raise


@pytest.mark.parametrize(
    "number", long_unless(lambda number: number < 2, range(ALL))
)
def test_random_programs_that_compute_again_need_no_more_memory(number):
    seed = ALL * SEED + number
    sizes = []

    def scheduled(program, remat=AGAIN):
        timeline = schedule(program, BatchSplit(2, 1000), remat)
        sizes.append(timeline.plan.bytes)
        return timeline

    program = Program(seed, 8)
    scheduled(kit.laid_out(program, *GIVEN), KEEP_ALL)
    with contextlib.suppress(kit.OneDeviceFails):
        kit.check_on_towers(
            program,
            *GIVEN,
            towers=kit.FEW,
            seed=seed,
            tolerance=2e-3,
            scheduled=scheduled,
        )
    assert max(sizes[1:]) <= sizes[0]


# How many operations are computed once in so many programs of each kind. If you
# add a rule, count again. Where a number grows, look for the rule that is gone.
PROGRAMS = 6
ONCE = {
    "number": 0,
    "pair": 0,
    "of_rows": 0,
    "across_rows": 4,
    "gathered": 6,
    "entries": 1,
    "segments": 11,
    "scattered_rows": 9,
    "masked": 10,
    "parted": 8,
    "ragged": 19,
    "rows_as_elements": 6,
    "pushed": 2,
    "function": 4,
    "branch": 7,
    "loop": 4,
    "scan": 10,
    "array": 10,
    "elements": 0,
    "map": 0,
    "scan_of_rows": 12,
    "rounds": 0,
}


@pytest.mark.parametrize("kind", sample_of(KINDS, 8))
def test_programs_of_one_operation_are_divided(kind):
    once = {}
    for seed in range(PROGRAMS):
        with contextlib.suppress(kit.OneDeviceFails):
            once[seed] = check(Program(seed, 1, KINDS[kind]), seed)
    found = sum(number for types in once.values() for number in types.values())
    assert found == ONCE[kind], once
