"""Two ranks give the weights of one process; each case is run by both."""

import json

import pytest

from tests.launch.jobs import ROOT, Launched

ROUNDING = 1e-6
SCRIPT = ROOT / "tests" / "horovod" / "two_processes.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("horovod") / "results.json"
    done = Launched(
        path.parent,
        ("-np", "2", str(SCRIPT), str(path)),
        HOROVOD_DYNAMIC_PROCESS_SETS="1",
    ).finish(240)
    found = json.loads(path.read_text()) if path.exists() else {}
    output = (done.out + done.err)[-8000:]
    return {"code": done.code, "output": output, "found": found}


@pytest.fixture
def of(results):
    """What a case found on both ranks."""

    def get(name):
        if name not in results["found"]:
            pytest.fail(f"{name} did not finish:\n{results['output']}")
        ranks = results["found"][name]
        errors = [rank["error"] for rank in ranks if "error" in rank]
        assert not errors, errors[0]
        return ranks

    return get


def test_all_ranks_end_well(results):
    assert results["code"] == 0, results["output"]


@pytest.mark.parametrize(
    ("name", "iterations"),
    [
        ("momentum", 12),
        ("clipped_embedding", 12),
        ("embedding_as_dense", 12),
        ("keras_accumulation", 6),
        ("decay_and_averages", 12),
        ("passes_averaged", 6),
        ("passes_summed", 6),
        ("passes_and_loss_scale", 6),
        ("divided_before", 12),
        ("summed", 12),
        ("summed_embedding", 12),
        ("groups_by_number", 12),
        ("groups_by_variables", 12),
        ("steps_at_once", 12),
        ("eager_fit", 12),
        ("eager_passes", 6),
        ("loop_eager", 6),
        ("loop_traced", 6),
        ("single_batches", 1),
        ("other_names", 12),
        ("overflow_on_one_rank", 5),
        ("trained_before", 24),
        ("auto_jit", 12),
    ],
)
def test_weights_are_those_of_one_process(of, name, iterations):
    for rank in of(name):
        assert rank["to_alone"] < ROUNDING
        assert rank["ranks"] == 0
        assert rank["moved"] > 1e-3
        assert rank["iterations"] == iterations


def test_each_of_two_optimizers_reduces(of):
    for rank in of("two_optimizers"):
        assert rank["to_alone"] < ROUNDING
        assert rank["ranks"] == 0


def test_half_precision_is_close_and_in_use(of):
    for rank in of("half_precision"):
        assert ROUNDING < rank["to_alone"] < 1e-3
        assert rank["ranks"] == 0


def test_an_overflow_of_one_rank_skips_the_step_of_all(of):
    for rank in of("overflow_on_one_rank"):
        assert rank["scales"] == [2.0**13, 2.0**13]


def test_the_loss_scale_that_compile_adds_goes_outside(of):
    for rank in of("mixed_precision"):
        assert rank["scaled"]
        assert rank["to_alone"] < 1e-2
        assert rank["ranks"] == 0


def test_auto_jit_is_off_only_for_a_distributed_optimizer(of):
    assert all(rank["plain_jit"] is True for rank in of("auto_jit"))


@pytest.mark.parametrize("name", ["broadcast_built", "broadcast_unbuilt"])
def test_all_ranks_begin_as_the_root_before_the_first_step(of, name):
    for rank in of(name):
        assert rank["to_alone"] < ROUNDING
        assert rank["ranks"] == 0


def test_an_eager_unbuilt_model_is_broadcast_after_its_first_batch(of):
    assert all(rank["ranks"] == 0 for rank in of("broadcast_eager"))


def test_optimizer_state_is_broadcast_and_local_variables_are_not(of):
    for rank in of("broadcast_trained_optimizer"):
        assert rank["apart"] == 0
        assert rank["kept"][0] == 0
        assert rank["kept"][1] > 0


def test_metrics_are_averaged_for_later_callbacks(of):
    for rank in of("metrics_averaged"):
        assert rank["names"] == ["accuracy", "loss", "val_accuracy", "val_loss"]
        assert rank["spread"] > 1e-3
        assert rank["off"] < ROUNDING
        assert rank["in_history"] < ROUNDING


def test_metrics_of_other_names_are_refused(of):
    for rank in of("metrics_differ"):
        assert "differ in extra" in rank["message"]


def test_warm_up_follows_the_rule_with_corrected_momentum(of):
    for rank in of("warm_up"):
        assert rank["to_alone"] < ROUNDING
        assert rank["logged"] == pytest.approx(rank["expected"])


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_a_saved_model_goes_on_and_is_plain_elsewhere(of, suffix):
    for rank in of("files"):
        assert rank[f"{suffix}_is_plain"]
        assert rank[f"{suffix}_iterations"] == 12
        assert rank[f"{suffix}_to_alone"] < ROUNDING
        assert rank[f"{suffix}_ranks"] == 0


def test_functions_take_arrays_numbers_tensors_and_variables(of):
    for rank in of("functions"):
        assert rank["sum"] == [1.0, 2.0]
        assert rank["type"] == "float64"
        assert rank["mean"] == 0.5
        assert rank["of_variable"] == [4.0, 4.0]
        assert rank["gathered"] == [0, 1, 1]
        assert rank["broadcast"] == 6.0
        assert rank["scattered"] == [[1.0, 3.0], [5.0, 7.0]]
        assert rank["object"] == {"rank": 1}


def test_a_local_layer_keeps_its_own_gradients(of):
    for rank in of("local_layer"):
        assert rank["shared"] == 0
        assert rank["local"] > 1e-3
        assert rank["off"] < ROUNDING


def test_ranks_of_other_sets_do_not_take_part(of):
    assert all(rank["ranks"] > 1e-3 for rank in of("sets_of_processes"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adasum", "built with MPI"),
        ("jit", "jit_compile=False"),
        ("strategy", "TowerStrategy"),
        ("integers", "cannot be compressed"),
    ],
)
def test_what_would_go_wrong_is_refused(of, name, words):
    for rank in of("refusals"):
        assert words in rank[name]
