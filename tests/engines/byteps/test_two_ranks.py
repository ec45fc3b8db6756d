"""Two processes over BytePS train what one would, and say what they refuse."""

import pytest

from tests.engines.byteps.test_jobs import pytestmark as pytestmark
from tests.kit.ranks import Job, names

# What does not depend on the engine is shown over the others.
KEPT = (
    *names("tests.engines.byteps.two_ranks"),
    *("dtypes_of_collectives", "a_large_sum_and_many_small_ones"),
)
MORE = (
    "embedding-clipped in shares",
    *("own_data_of_unequal_length", "accumulation", "steps-per-execution"),
    "other_gradients_are_refused",
    "other_data_of_an_epoch_that_follows_is_refused",
    *("weights_optimizer_and_shuffles_are_those_of_rank_0", "own_loop"),
)


def job(ranks, servers, wanted):
    return Job(
        "tests.engines.byteps.two_ranks",
        ranks,
        400,
        wanted,
        options=("--servers", str(servers)),
        TESTED_STRATEGY="BytePSStrategy",
    )


JOB = job(2, 1, KEPT)
MORE_JOB = job(2, 1, MORE)
# Tensors are spread over the servers.
THREE_RANKS = job(3, 2, ("embedding-clipped",))


@pytest.mark.parametrize("name", KEPT)
def test_two_ranks(name):
    JOB.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_more(name):
    MORE_JOB.assert_passed(name)


@pytest.mark.long
def test_three_ranks_and_two_servers():
    THREE_RANKS.assert_passed("embedding-clipped")
