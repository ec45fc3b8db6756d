"""Two processes on GPUs, over every engine that is there, or two workers.

Where there is one GPU only they share it, and sum on the host.
"""

import functools
import importlib.util

import pytest
import tensorflow as tf

from keras_towers.foundation.settings import ENV_NCCL_TIMEOUT, ENV_OWN_GPUS
from tests.gpu.towers import HARD
from tests.kit import gpus
from tests.kit.gpus import SHARED
from tests.kit.ranks import ENDS_WELL, Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not gpus.ON, reason="tests/processes has ranks on CPUs; these need GPUs"
    ),
]

# What connects the ranks: the launcher's options, and the module it needs.
ENGINES = {
    "HorovodStrategy": (("-np",), (), "horovod"),
    "MultiWorkerTowerStrategy": (("--workers",), (), "tensorflow"),
    "BytePSStrategy": (("-np",), ("--servers", "1"), "byteps"),
    "SyncReplicasStrategy": (("--workers",), ("--ps", "1"), "tensorflow"),
}
CHECKED = ("every_rank_has_a_gpu", *HARD)
# Workers normalize their own rows, and know all optimizers before they train.
OF_WORKERS = [n for n in CHECKED if n not in ("sync-batch-norm", "gan")]
OF_ENGINES = {
    strategy: OF_WORKERS if strategy == "SyncReplicasStrategy" else CHECKED
    for strategy in ENGINES
}


@functools.cache
def job(strategy):
    (number,), options, module = ENGINES[strategy]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"not installed: `keras-towers install {module}`")
    physical = len(tf.config.list_physical_devices("GPU"))
    variables = {}
    if gpus.ON == "gpu" and physical < 2:
        variables = {
            ENV_OWN_GPUS: "1",
            SHARED: "1",
            # It refuses them; tests/gpu/test_nccl.py has another way.
            ENV_NCCL_TIMEOUT: "0",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
    return Job(
        "tests.gpu.ranks",
        OF_ENGINES[strategy],
        limit_s=500,
        number=number,
        options=options,
        TESTED_STRATEGY=strategy,
        # TensorFloat-32 has too few bits for a comparison.
        NVIDIA_TF32_OVERRIDE="0",
        **variables,
    )


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(s, name) for s in ENGINES for name in (*OF_ENGINES[s], ENDS_WELL)],
)
def test_two_ranks(strategy, name):
    job(strategy).assert_passed(name)
