"""Ranks that sum over NCCL: two and four, which may share one GPU."""

import functools
import importlib.util
import time

import pytest
import tensorflow as tf

from keras_towers.foundation.settings import ENV_OWN_GPUS
from tests.gpu.towers import HARD
from tests.kit import gpus
from tests.kit.processes import Launched
from tests.kit.ranks import ENDS_WELL, Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not gpus.ON, reason="these ranks need GPUs"),
]

ENGINES = {
    "HorovodStrategy": "-np",
    "MultiWorkerTowerStrategy": "--workers",
}
FIRST = ("ranks_sum_over_nccl", "sums_are_those_of_the_host")
ROWS = "rows_that_all_ranks_know_are_scattered_and_gathered"
CHECKED = {
    2: (
        *FIRST,
        ROWS,
        *("dtypes_of_collectives", "a_large_sum_and_many_small_ones"),
        "weights in shards",
        *HARD,
    ),
    4: FIRST,
}
NOTICED_S = 60


def variables(strategy):
    """The environment of ranks, of which each is a host of its own to NCCL."""
    if strategy == "HorovodStrategy" and gpus.ON == "gpu":
        if importlib.util.find_spec("horovod") is None:
            pytest.skip("`keras-towers install horovod --with-nccl`")
        import horovod.tensorflow as hvd

        if not hvd.nccl_built():
            pytest.skip("this Horovod was built without NCCL")
    shared = {}
    if gpus.ON == "gpu" and len(tf.config.list_physical_devices("GPU")) < 4:
        shared = {ENV_OWN_GPUS: "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    return {
        "TESTED_STRATEGY": strategy,
        # TensorFloat-32 has too few bits for a comparison.
        "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        **shared,
    }


@functools.cache
def job(strategy, number):
    return Job(
        "tests.gpu.nccl",
        CHECKED[number],
        ranks=number,
        limit_s=300,
        number=ENGINES[strategy],
        **variables(strategy),
    )


@pytest.mark.parametrize(
    ("number", "name"),
    [(n, name) for n in CHECKED for name in (*CHECKED[n], ENDS_WELL)],
)
@pytest.mark.parametrize("strategy", ENGINES)
def test_ranks(strategy, number, name):
    job(strategy, number).assert_passed(name)


@pytest.mark.parametrize("strategy", ENGINES)
def test_a_rank_that_dies_within_a_sum_is_noticed(strategy, tmp_path):
    number = ENGINES[strategy]
    ranks = number, 2, "-m", "tests.gpu.nccl", "die"
    dies = Launched(tmp_path, *ranks, **variables(strategy))
    dies.wait_for("begins", times=2, limit_s=120)
    begun = time.monotonic()
    dies.finish(NOTICED_S)
    assert time.monotonic() - begun < NOTICED_S
    assert dies.code != 0
    assert "SIGKILL" in dies.output
