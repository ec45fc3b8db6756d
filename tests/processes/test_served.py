"""Replicas over parameter servers give what one device gives."""

import pytest

from tests.kit.ranks import Job, cases, names

pytestmark = pytest.mark.slow
USAGE = names("tests.processes.served")
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
MORE = (
    "last-batch-of-one",
    "accumulation-clipped",
    "loss-scale-overflow",
    "ema-overwrite",
    "mixed-float16",
    "steps-per-execution",
    "sample-weight",
    "lazy",
    "validation",
)
THREE = (
    "last-batch-of-one",
    "embedding-clipped",
    "loss-scale-overflow",
    "workers_compute_several_gradients_of_an_update",
)
COPIES = (
    "accumulation-clipped",
    "one_that_stops_leaves_and_the_chief_ends_all",
    "models_and_fits_in_turns_also_in_another_block",
    "unequal_lengths_end",
    "other_usage_is_refused",
)
SHARED = ("embedding-clipped", "loss-scale-overflow")


def job(wanted, workers=2, strategy="SyncReplicasStrategy", **variables):
    return Job(
        "tests.processes.served",
        ranks=workers,
        limit_s=400,
        wanted=wanted,
        number="--workers",
        options=("--ps", "2"),
        TESTED_STRATEGY=strategy,
        **variables,
    )


JOBS = {"two workers": job(KEPT, **PARTS)}
LONG = {
    "more cases": job((*RARER, *MORE)),
    "three workers": job(THREE, workers=3, **PARTS),
    "copies on towers": job(
        COPIES, strategy="DistributedReplicatedStrategy", **PARTS
    ),
    "a copy that towers share": job(
        SHARED, strategy="DistributedParameterServerStrategy", **PARTS
    ),
}


@pytest.mark.parametrize(
    "job, name", cases(JOBS) + cases(LONG, pytest.mark.long)
)
def test_workers(job, name):
    job.assert_passed(name)
