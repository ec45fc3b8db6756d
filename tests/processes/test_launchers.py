"""Ranks that other launchers start train one model."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.kit.launchers import inherited
from tests.kit.warm import environment
from tests.launching.jobs import ROOT
from tests.processes import started

pytestmark = pytest.mark.slow
LIMIT_S = 100
RANKS = 2


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
def jobs(tmp_path):
    """Starts processes of a job, and asserts what they have trained."""
    running = []

    def start(job, *before, warm=True, **variables):
        (tmp_path / job).mkdir(exist_ok=True)
        paths = str(ROOT), os.environ["PYTHONPATH"]
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            "KERAS_TOWERS_MEETING_TIMEOUT": "60",
        }
        worker = "tests.processes.started", tmp_path / job, "HorovodStrategy"
        running.append(
            subprocess.Popen(
                [*before, sys.executable, "-m", *map(str, worker)],
                env={
                    **inherited(),
                    **own,
                    **environment(warm),
                    **variables,
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def assert_trained(*jobs):
        for process in running:
            _, error = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, error[-3000:]
        for job in jobs:
            started.assert_as_one_process(tmp_path / job, RANKS)

    yield start, assert_trained
    for process in running:
        process.kill()
        process.communicate()


def test_two_jobs_at_once_get_the_weights_of_one_process(jobs):
    start, assert_trained = jobs
    for variables in (of_slurm, of_torchrun):
        for rank in reversed(range(RANKS)):
            start(variables.__name__, **variables(rank))
    assert_trained("of_slurm", "of_torchrun")


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_mpirun(jobs):
    start, assert_trained = jobs
    options = ["--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    start("by_mpirun", "mpirun", *options, warm=False)
    assert_trained("by_mpirun")
