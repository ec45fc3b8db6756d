"""Ranks of a job train as one process does, over each engine."""

import pytest

from tests.exactness.cases import CASES
from tests.kit.ranks import Job, cases, names

pytestmark = pytest.mark.slow


USAGE = names(
    "tests.processes.training",
    "tests.processes.callbacks",
    "tests.processes.compression",
    "tests.processes.distribution",
    "tests.processes.steps",
    "tests.processes.rounds",
    "tests.processes.shares",
)
# One of each kind of reduction: of values that are infinite on one rank, that
# depend on the whole batch, that are sparse, and of rows instead of gradients.
# Of those that have weights, batch normalization, there is a case over
# TensorFlow.
EXACT = [
    *("loss-scale-overflow", "contrastive", "wide"),
    "embedding-clipped in shares",
]
ON_TOWERS = [
    "last-batch-of-one on two towers",
    "embedding-clipped on two towers",
]
# What others show, too: of data and updates more than of ranks. A job of their
# own: on a busy machine one for all would take too long.
RARER = (
    "an_error_between_steps_of_shares",
    "batches_by_hand_in_shares",
    "stop_of_evaluate_and_predict",
    "xla_compiles_what_each_rank_computes",
    "a_fit_within_an_epoch_of_another",
    "training_goes_on_where_ranks_are_not_synchronised",
    "state_that_rank_0_has_loaded_in_shares",
    # Others show compression, and state in shares.
    "forms_are_near_the_exact_sum",
    "optimizers_whose_state_is_not_one_slot_for_each_weight",
    "timeline_of_a_fit_that_fails",
    "after_a_round_that_only_some_ranks_went_on_with",
    "rounds_end_where_weights_are_used",
    "a_backup_within_an_epoch_keeps_what_all_ranks_have_counted",
    "rounds_with_an_outer_step_on_two_towers",
    "rounds_that_cannot_be",
)
HOROVOD = [
    *(name for name in USAGE if name not in RARER),
    *EXACT,
]
REST = [
    *(name for name in CASES if name not in EXACT),
    *ON_TOWERS,
    "lazy in shares",
    "loss-scale-overflow in shares of two towers",
    "sync-batch-norm on two towers",
    "contrastive on two towers",
    "micro-batches on two towers",
]
THREE = [
    *("last-batch-of-one", "loss-scale-overflow", "sync-batch-norm"),
    *("contrastive", "embedding-clipped in shares"),
]
# What depends on the transport most, and several towers of a rank.
TENSORFLOW = [
    *names("tests.processes.over_tensorflow"),
    "attributes",
    "other_versions_are_refused",
    "other_data_of_an_epoch_that_follows_is_refused",
    "embedding-clipped on two towers",
    # Its pieces need the shapes of one another.
    "sync-batch-norm on two towers",
]
TENSORFLOW_REST = [
    # Makes its strategy first, which has to start TensorFlow.
    "dtypes_of_collectives",
    "own_data_of_unequal_length",
    "what_is_computed_by_hand_is_that_of_one_process",
    "integers_are_reduced_over_all_ranks",
    "xla_compiles_what_each_rank_computes",
    "what_differs_between_ranks_is_named",
    "forms_are_near_the_exact_sum",
    "own_loop",
    "last-batch-of-one on two towers",
    "micro-batches on two towers",
    "other_gradients_are_refused",
    "rounds_with_an_outer_step_on_two_towers",
    "state_is_shared_in_steps_and_whole_between_epochs",
    "accumulation in shares",
]
ON_TWO_TOWERS = {"VIRTUAL_TOWERS": "2"}
OVER_TENSORFLOW = {
    "number": "--workers",
    "TESTED_STRATEGY": "MultiWorkerTowerStrategy",
    **ON_TWO_TOWERS,
}


def job(wanted, ranks=2, **options):
    return Job("tests.processes.ranks", ranks, 480, tuple(wanted), **options)


JOBS = {
    "Horovod": job(HOROVOD),
    "TensorFlow": job(TENSORFLOW, **OVER_TENSORFLOW),
}
LONG = {
    "Horovod, rarer": job(RARER, **ON_TWO_TOWERS),
    "Horovod, the rest": job(REST, **ON_TWO_TOWERS),
    "Horovod, three ranks": job(THREE, ranks=3),
    "TensorFlow, the rest": job(TENSORFLOW_REST, **OVER_TENSORFLOW),
}


@pytest.mark.parametrize(
    "job, name", cases(JOBS) + cases(LONG, pytest.mark.long)
)
def test_ranks(job, name):
    job.assert_passed(name)
