"""Ranks of a job train as one process does, over each engine."""

import pytest

from keras_towers.inspection.conformance.cases import CASES
from tests.kit.ranks import Job, each_check_of, names
from tests.kit.sampling import draw

pytestmark = pytest.mark.slow
MODULES = [
    f"tests.processes.{module}"
    for module in (
        *("training", "differences", "callbacks", "saving", "compression"),
        *("distribution", "steps", "rounds", "shares", "shares_kept", "mesh"),
        *("roles", "own_loops", "asking"),
    )
]
# Each over one of the engines.
ON_MESHES = [
    "shards_within_each_process",
    "a_mesh_whose_towers_share_weights_within_each_process",
]
OVER_HOROVOD, OVER_TENSORFLOW = draw(ON_MESHES)
KNOWN_ROWS = "rows_that_all_ranks_know_are_scattered_and_gathered"
# One of each kind of reduction: of values that are infinite on one rank, that
# depend on the whole batch, that are sparse, and of rows instead of gradients.
# Of those that have weights, batch normalization, there is a case over
# TensorFlow.
EXACT, NOT_EXACT = draw(
    [
        *("loss-scale-overflow", "contrastive", "wide"),
        "embedding-clipped with weights in shards",
    ]
)
# What the first step makes gets its place on all ranks.
FIRST_STEP, FIRST_STEPS = draw(
    [
        "counting-python",
        "counting-python with weights in shards on two towers",
        "loss-scale-of-own-step in shares on two towers",
    ],
    3,
)
ON_TOWERS = [
    "last-batch-of-one on two towers",
    "embedding-clipped on two towers",
]
REST = [
    *(n for n in CASES if n not in {*EXACT, *NOT_EXACT, "counting-python"}),
    *NOT_EXACT,
    *FIRST_STEPS,
    *ON_TOWERS,
    *("lazy in shares", "embedding-clipped in shares"),
    "loss-scale-overflow in shares on two towers",
    "mixed-float16 with weights in shards",
    "accumulation-clipped with weights in shards on two towers",
    "sync-batch-norm on two towers",
    "contrastive on two towers",
    "sync-batch-norm in micro-batches on two towers",
]
THREE = [
    *("last-batch-of-one", "loss-scale-overflow", "sync-batch-norm"),
    *("contrastive", "embedding-clipped in shares"),
    "embedding-clipped with weights in shards",
    KNOWN_ROWS,
]
# What depends on the transport most, and several towers of a rank.
TENSORFLOW = [
    *names("tests.processes.over_tensorflow"),
    "calls_in_replicas",
    "variables_without_a_seed_begin_as_on_rank_0",
    "other_versions_are_refused",
    "other_data_of_an_epoch_that_follows_is_refused",
    "what_one_rank_writes_between_calls_reaches_all",
    "what_python_computes_in_a_step_is_that_of_rank_0",
    "embedding-clipped on two towers",
    "embedding-clipped with weights in shards on two towers",
    # Its pieces need the shapes of one another.
    "sync-batch-norm on two towers",
]
TENSORFLOW_REST = [
    "data_of_unknown_length_that_ends_early_on_a_rank_is_refused",
    "own_data_of_unequal_length",
    "xla_compiles_what_each_rank_computes",
    "what_differs_between_ranks_is_named",
    "calls_in_callbacks_of_some_ranks_run_there_alone",
    "own_loop",
    "last-batch-of-one on two towers",
    "sync-batch-norm in micro-batches on two towers",
    "layers_with_other_settings_are_refused",
    "state_is_in_shards_and_reads_as_a_whole",
    "accumulation in shares",
    "a_model_in_shards_is_compiled_again_and_exported",
]
# Each process has devices for a mesh of two towers with two columns.
ON_FOUR_DEVICES = {"VIRTUAL_TOWERS": "4"}
ON_TENSORFLOW = {
    "number": "--workers",
    "TESTED_STRATEGY": "MultiWorkerTowerStrategy",
    **ON_FOUR_DEVICES,
}


def job(wanted, **options):
    return Job("tests.processes.ranks", wanted, **options)


# One that can only be the last of a job.
(LAST,) = names("tests.processes.ended")
# Each engine ends the collectives of other ranks in its own way.
FAILS, *FAILURES = names("tests.processes.failures")
DRAWN, OTHERS = draw(
    [n for n in (*names(*MODULES), *FAILURES) if n not in ON_MESHES], 16
)
OVER_COLLECTIVES, NOT_DRAWN = draw([*TENSORFLOW, *FAILURES], 6)
JOBS = {
    "Horovod": job(
        (FAILS, *DRAWN, *EXACT, *FIRST_STEP, *OVER_HOROVOD, KNOWN_ROWS, LAST),
        **ON_FOUR_DEVICES,
    ),
    "TensorFlow": job(
        (FAILS, *OVER_COLLECTIVES, *FIRST_STEPS, *OVER_TENSORFLOW, LAST),
        **ON_TENSORFLOW,
    ),
}
# Over TensorFlow, besides those above.
MESHES = [
    "a_mesh_in_each_process",
    "a_mesh_whose_towers_share_weights_over_all_processes",
    "slots_in_shards_within_each_process",
]
LONG = {
    # One job for all would take too long on a busy machine.
    **{
        f"Horovod, not drawn, part {k}": job(OTHERS[k::4], **ON_FOUR_DEVICES)
        for k in range(4)
    },
    "Horovod, the rest": job((*REST, *OVER_TENSORFLOW), **ON_FOUR_DEVICES),
    "Horovod, three ranks": job(THREE, ranks=3),
    "TensorFlow, the rest": job(
        (*NOT_DRAWN, *TENSORFLOW_REST, *MESHES, *OVER_HOROVOD), **ON_TENSORFLOW
    ),
}
test_ranks = each_check_of(JOBS, LONG)
