"""Ranks that other launchers start train one model."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from keras_towers.launching import clusters
from tests.launching.jobs import ROOT

LIMIT_S = 100
RANKS = 2

# The last batch is uneven, so that the shares of the ranks differ.
SCRIPT = """
import json, os, sys
import keras, numpy as np
import keras_towers as kt

random = np.random.default_rng(0)
x = random.normal(size=(21, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
size = 1
if len(sys.argv) > 1:
    strategy = kt.HorovodStrategy()
    size = strategy.size
    with strategy:
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    import keras_towers.horovod as hvd

    hvd.init()
    assert hvd.size() == size and hvd.rank() == strategy.rank
else:
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
print(json.dumps([size, [float(w) for w in model.get_weights()[0][:, 0]]]))
"""


def of_slurm(rank):
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_PROCID": str(rank),
    }


def of_torchrun(rank):
    return {
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    running = []

    def start(*before, arguments=("over ranks",), **variables):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in clusters.RANK_VARIABLES
        }
        path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
        own = {"PYTHONPATH": path, "KERAS_TOWERS_MEETING_TIMEOUT": "60"}
        running.append(
            subprocess.Popen(
                [*before, sys.executable, str(script), *arguments],
                env={**inherited, **own, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def results(*processes):
    """What was printed, in lines of JSON."""
    lines = []
    for process in processes:
        out, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, error[-3000:]
        lines += map(json.loads, out.splitlines())
    return lines


@pytest.mark.slow
def test_two_jobs_at_once_get_the_weights_of_one_process(start):
    both = [
        start(**variables(rank))
        for variables in (of_slurm, of_torchrun)
        for rank in reversed(range(RANKS))
    ]
    alone = start(arguments=())
    ((_, wanted),) = results(alone)
    found = results(*both)
    assert len(found) == 2 * RANKS
    for size, weights in found:
        assert size == RANKS
        assert weights == pytest.approx(wanted, abs=1e-6)
        assert weights == found[0][1]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_mpirun(start):
    options = ["--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    found = results(start("mpirun", *options))
    assert [size for size, _ in found] == [RANKS] * RANKS
    assert found[0] == found[1]
