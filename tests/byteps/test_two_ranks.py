"""Two processes over BytePS train what one would, and say what they refuse."""

import pytest

from tests.kit.long import long_but
from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow

ON_BYTEPS = {
    "options": ("--servers", "1"),
    "TESTED_STRATEGY": "BytePSStrategy",
}
ENGINE = names("tests.byteps.engine") + names("tests.byteps.dropin")
OF_HOROVOD = names("tests.processes.training") + names("tests.processes.steps")
# The rest does not depend on the engine; `make test-all` has it.
KEPT = (
    *ENGINE,
    "weights_of_rank_0_whatever_the_seeds",
    "own_data_of_unequal_length",
    "other_gradients_are_refused",
)
CASES = (
    *("adam", "embedding", "accumulation", "steps-per-execution"),
    "embedding-clipped in shares",
)
KEPT_CASES = ("accumulation", "embedding-clipped in shares")
CHECKS = {
    True: Job("tests.byteps.two_ranks", 2, 200, KEPT, **ON_BYTEPS),
    False: Job(
        *("tests.byteps.two_ranks", 2, 400),
        tuple(name for name in OF_HOROVOD if name not in KEPT),
        **ON_BYTEPS,
    ),
}
EXACT = {
    kept: Job(
        *("tests.processes.exact", 2, 200),
        tuple(name for name in CASES if (name in KEPT_CASES) is kept),
        **ON_BYTEPS,
    )
    for kept in (True, False)
}
# Tensors are spread over the servers.
THREE_RANKS = Job(
    *("tests.processes.exact", 3, 200, ("embedding",)),
    **{**ON_BYTEPS, "options": ("--servers", "2")},
)


@pytest.mark.parametrize(
    "name", long_but(KEPT.__contains__, ENGINE + OF_HOROVOD)
)
def test_two_ranks(name):
    CHECKS[name in KEPT].assert_passed(name)


@pytest.mark.parametrize("name", long_but(KEPT_CASES.__contains__, CASES))
def test_exactness(name):
    EXACT[name in KEPT_CASES].assert_passed(name)


@pytest.mark.long
def test_three_ranks_and_two_servers():
    THREE_RANKS.assert_passed("embedding")


def test_the_jobs_end_well():
    CHECKS[True].assert_ended_well()
    EXACT[True].assert_ended_well()
