"""Replicas over parameter servers give what one device gives."""

import pytest

from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow
*USAGE, FREED = names("tests.processes.served")
EXACT = ("last-batch-of-one", "embedding-clipped", "loss-scale-overflow")
# What depends on how often the workers meet at the servers, not on how many.
RARER = (
    "models_and_fits_in_turns_also_in_another_block",
    "unequal_lengths_end",
    "masks_are_of_the_own_part_and_warned_of",
    "who_has_no_examples_writes_no_state",
    "workers_with_data_of_their_own_draw_masks_of_their_own",
)
KEPT = ("embedding-clipped", *(name for name in USAGE if name not in RARER))
# Every weight by itself, as large ones are.
PARTS = {"PART_BYTES": "1"}
# Of each: the checks, the workers, and what else differs.
MORE = {
    "more cases": (
        (
            *RARER,
            "last-batch-of-one",
            "accumulation-clipped",
            "loss-scale-overflow",
            "ema-overwrite",
            "mixed-float16",
            "steps-per-execution",
            "sample-weight",
            "lazy",
            "validation",
        ),
        2,
        {},
    ),
    # Its memory is that of its own process.
    "one server": (
        (FREED,),
        2,
        {"servers": 1, "REPETITIONS": "20"},
    ),
    "three workers": (
        (*EXACT, "workers_compute_several_gradients_of_an_update"),
        3,
        PARTS,
    ),
    "workers that update by themselves": (
        (
            "one_that_stops_leaves_and_the_chief_ends_all",
            "models_and_fits_in_turns_also_in_another_block",
            "unequal_lengths_end",
            "other_usage_is_refused",
        ),
        2,
        {"TESTED_STRATEGY": "DistributedReplicatedStrategy", **PARTS},
    ),
}


def job(wanted, workers, options):
    options = {"TESTED_STRATEGY": "SyncReplicasStrategy", **options}
    return Job(
        "tests.processes.served",
        ranks=workers,
        limit_s=400,
        wanted=wanted,
        number="--workers",
        options=("--ps", str(options.pop("servers", 2))),
        **options,
    )


JOB = job(KEPT, 2, PARTS)
LONG = {kind: job(*given) for kind, given in MORE.items()}


@pytest.mark.parametrize("name", KEPT)
def test_two_workers(name):
    JOB.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind in MORE for name in MORE[kind][0]]
)
def test_more(kind, name):
    LONG[kind].assert_passed(name)
