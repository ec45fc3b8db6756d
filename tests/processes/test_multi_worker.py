"""What users do with ``MultiWorkerTowerStrategy``, in two real processes."""

import pytest

from tests.kit.long import long_but
from tests.kit.ranks import Job, names
from tests.launching.jobs import Launched

pytestmark = pytest.mark.slow

COLLECTIVES = names("tests.processes.over_tensorflow")
SHARED = tuple(
    name
    for module in ("training", "compression", "leaving", "steps")
    for name in names(f"tests.processes.{module}")
)
# What depends on the transport most; the rest is in `make test-all`.
KEPT = (
    "attributes",
    "other_models_are_refused",
    "other_gradients_are_refused",
    "several_steps_at_once",
    "xla_compiles_what_each_rank_computes",
    "forms_are_near_the_exact_sum",
    "shared_memory_is_exact_to_the_bit",
    "what_differs_between_ranks_is_named",
)
# Several towers of a rank, among other things.
EXACT = (
    "embedding-clipped in shares",
    "accumulation in shares",
    "embedding-clipped on two towers",
    "loss-scale-overflow on two towers",
    "steps-per-execution on two towers",
    "last-batch-of-one on two towers",
    "batch-norm of the global batch",
)
KEPT_EXACT = (
    "accumulation in shares",
    "embedding-clipped on two towers",
    "last-batch-of-one on two towers",
)


def job(module, limit_s, wanted):
    return Job(
        module,
        ranks=2,
        limit_s=limit_s,
        wanted=wanted,
        number="--workers",
        TESTED_STRATEGY="MultiWorkerTowerStrategy",
    )


RANKS = "tests.processes.tensorflow_ranks"
KEPT_JOB = job(RANKS, 240, (*COLLECTIVES, *KEPT))
REST_JOB = job(RANKS, 480, tuple(n for n in SHARED if n not in KEPT))
EXACT_JOBS = {
    kept: job(
        *("tests.processes.exact", 240),
        tuple(name for name in EXACT if (name in KEPT_EXACT) is kept),
    )
    for kept in (True, False)
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    KEPT_JOB.assert_passed(name)


@pytest.mark.parametrize("name", long_but(KEPT.__contains__, SHARED))
def test_what_horovod_does(name):
    (KEPT_JOB if name in KEPT else REST_JOB).assert_passed(name)


def test_the_job_ends_well():
    KEPT_JOB.assert_ended_well()


@pytest.mark.parametrize("name", long_but(KEPT_EXACT.__contains__, EXACT))
def test_weights_are_those_of_one_device(name):
    EXACT_JOBS[name in KEPT_EXACT].assert_passed(name)


SCRIPT = """
import keras
import numpy as np

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
x = np.ones((40, 4), "float32")
model.fit(x, x[:, :2], verbose=0)
model.save("model.keras")
same = keras.models.load_model("model.keras").get_weights()
for one, other in zip(same, model.get_weights()):
    print("differ by", abs(one - other).max())
"""


def test_an_unmodified_script_saves_once(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--strategy", "multi-worker", "-np", "2", "train.py")
    done = Launched(tmp_path, options, TF_CPP_MIN_LOG_LEVEL="3").finish(100)
    assert done.code == 0, done.out + done.err
    for rank in range(2):
        assert f"[worker {rank}] differ by 0.0" in done.out
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["model.keras", "train.py"]
