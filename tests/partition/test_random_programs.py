"""Random programs against one device; each seed of the tests has others."""

import pytest

from tests.kit.sampling import SEED, long_unless
from tests.partition import kit
from tests.partition.random_programs import GIVEN, Program

DRAWN, ALL = 4, 24


@pytest.mark.parametrize(
    "number", long_unless(lambda number: number < DRAWN, range(ALL))
)
def test_random_programs(number):
    seed = ALL * SEED + number
    program = Program(seed)
    try:
        kit.check_on_towers(
            program, *GIVEN, towers=kit.FEW, seed=seed, tolerance=2e-3
        )
    except kit.OneDeviceFails as error:
        pytest.skip(str(error))
    except Exception as error:
        # A program of fewer operations begins like one of more.
        error.add_note(f"Program({seed}) has {', '.join(program.drawn)}")
        raise
